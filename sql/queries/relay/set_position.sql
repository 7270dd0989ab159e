-- The target $1 continues after the position $2, forwards or backwards, and its failures are forgotten. The process that
-- delivers starts again there.
UPDATE relay_targets SET position = $2, fence = fence + 1, failures = 0, retry_at = NULL WHERE name = $1
