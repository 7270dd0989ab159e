-- The newest position that was given to an event, settled or not, and the fence of the target $1; NULL if it is not active.
-- It is read before writers.sql.
SELECT newest_position(), (SELECT fence FROM relay_targets WHERE name = $1 AND state = 'active')
