-- Removes a target and its position.
DELETE FROM relay_targets WHERE name = $1
