-- The payments of list.sql whose refund is due, found by the index of these.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at,
       coalesce(data ->> 'refund_reference', '') AS refund_reference, coalesce(data ->> 'operator', '') AS operator, coalesce(data ->> 'unreadable', '') AS unreadable
FROM payments JOIN (SELECT reference, version FROM payment_events WHERE type = 'PaymentRefundDue' AND position > $1) AS due USING (reference, version)
WHERE position > $1 AND ($3::uuid IS NULL OR sale_id = $3) AND ($4::uuid IS NULL OR order_id = $4)
ORDER BY position
LIMIT $2
