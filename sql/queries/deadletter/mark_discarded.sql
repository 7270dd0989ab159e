-- Notes that the dead letter $1, if it is still parked, was given up: $2 says why and what became of its order.
UPDATE dead_letters
SET status = 'discarded', resolution = $2, updated_at = now()
WHERE id = $1 AND status = 'parked'
