-- Marks the dead letter $1 as discarded, if it is still parked: $2 says why and what became of its order. $3 is the operator, or NULL.
UPDATE dead_letters
SET status = 'discarded', resolution = $2, operator = $3, updated_at = now()
WHERE id = $1 AND status = 'parked'
