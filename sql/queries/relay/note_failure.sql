-- Notes that a delivery to the target $1 failed, under the fence $2: so many in a row ($3), why ($4), and that nothing is
-- sent for $5 milliseconds. All events up to $7 are delivered. $6 disables the target.
UPDATE relay_targets
SET failures = $3, last_error = $4, last_error_at = now(), retry_at = now() + $5::bigint * interval '1 millisecond',
    state = CASE WHEN $6 THEN 'disabled' ELSE state END, position = $7
WHERE name = $1 AND fence = $2
