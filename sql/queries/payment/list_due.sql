-- The payments of list.sql whose refund is due, found by the index of these.
SELECT reference, version, position, order_id, sale_id, amount, currency, 'refund_due' AS state, coalesce(reason, '') AS reason,
       (SELECT occurred_at FROM payment_events AS first WHERE first.reference = due.reference AND first.version = 1) AS received_at, occurred_at AS updated_at,
       '' AS refund_reference, coalesce(data ->> 'operator', '') AS operator, coalesce(data ->> 'unreadable', '') AS unreadable
FROM payment_events AS due
WHERE type = 'PaymentRefundDue' AND position > $1 AND ($3::uuid IS NULL OR sale_id = $3) AND ($4::uuid IS NULL OR order_id = $4)
  AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = due.reference AND later.version = due.version + 1)
ORDER BY position
LIMIT $2
