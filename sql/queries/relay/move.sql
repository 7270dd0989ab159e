-- Moves the position of the target $1 to $3, unless another process delivers by now or an operator has changed the
-- target: then its fence is not $2, and no row is changed.
UPDATE relay_targets
SET position = $3, failures = 0, retry_at = NULL, delivered_at = CASE WHEN $4 THEN now() ELSE delivered_at END
WHERE name = $1 AND fence = $2
