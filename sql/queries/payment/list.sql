-- Payments in the order of their latest events, after the position $1: at most $2, with the state $3, of the sale $4, for the order $5.
-- Each of $3 to $5 may be NULL.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at,
       coalesce(data ->> 'refund_reference', '') AS refund_reference, coalesce(data ->> 'operator', '') AS operator, coalesce(data ->> 'unreadable', '') AS unreadable
FROM payments
WHERE position > $1 AND ($3::text IS NULL OR state = $3) AND ($4::uuid IS NULL OR sale_id = $4) AND ($5::uuid IS NULL OR order_id = $5)
ORDER BY position
LIMIT $2
