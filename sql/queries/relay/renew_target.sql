-- Replaces the secrets ($3) of a target, and whether private addresses are allowed ($4), if it has the URL $2.
-- The process that delivers starts again with them.
UPDATE relay_targets SET secrets = $3, allow_private = $4, fence = fence + 1 WHERE name = $1 AND url = $2
