-- The payment $1 in its present state.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at,
       coalesce(data ->> 'refund_reference', '') AS refund_reference, coalesce(data ->> 'operator', '') AS operator, coalesce(data ->> 'unreadable', '') AS unreadable
FROM payments
WHERE reference = $1
