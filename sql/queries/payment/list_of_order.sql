-- The payments for the order $3 in the order of their latest events, after the position $1: at most $2. Those with the state $4 and of the
-- sale $5; each of the two may be NULL.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at, data
FROM payments
WHERE order_id = $3 AND position > $1 AND ($4::text IS NULL OR state = $4) AND ($5::uuid IS NULL OR sale_id = $5)
ORDER BY position
LIMIT $2
