-- The target $1 continues after the position $2, forwards or backwards, and its failures are forgotten. The process that
-- delivers starts again there. Returns the position where it was.
WITH before AS (SELECT name, position FROM relay_targets WHERE name = $1 FOR UPDATE)
UPDATE relay_targets AS t SET position = $2, fence = fence + 1, failures = 0, retry_at = NULL
FROM before WHERE t.name = before.name
RETURNING before.position
