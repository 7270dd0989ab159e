-- Locks the turns to pay of those of the sales $1 that have a pace, until the end of the transaction: the next statement sees
-- the turns that others have given out before. Other orders of these sales can be paid and cancelled meanwhile.
-- Returns the sales.
SELECT id FROM (SELECT id FROM sales WHERE id = ANY ($1::uuid[]) AND payments_per_second > 0 ORDER BY id) AS paced, pg_advisory_xact_lock(5391, hashtext(id::text))
