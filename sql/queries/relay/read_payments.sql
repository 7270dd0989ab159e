-- The events of payments after the position $1, up to $2, in the order of their positions: at most $3 of them. A report
-- (PaymentReceived) has no event for others: what was decided about it has.
SELECT position, reference, version, type, occurred_at, order_id, sale_id, coalesce(amount, 0) AS amount, coalesce(currency, '') AS currency,
       coalesce(reason, '') AS reason, coalesce(data ->> 'unreadable', '') AS unreadable,
       coalesce(data ->> 'refund_reference', '') AS refund_reference, coalesce(data ->> 'operator', '') AS operator,
       coalesce(data ->> 'note', '') AS note, coalesce(data ->> 'dispute', '') AS dispute
FROM payment_events
WHERE position > $1 AND position <= $2 AND type <> 'PaymentReceived'
ORDER BY position
LIMIT $3
