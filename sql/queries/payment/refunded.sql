-- Notes that the payment $1, whose refund is due, was refunded: $2 the reference of the refund, $3 the operator who says so.
-- Returns no row if no refund is due; a concurrent call fails with unique_violation.
INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
SELECT reference, version + 1, 'PaymentRefunded', order_id, sale_id, amount, currency, reason, data || jsonb_build_object('refund_reference', $2::text, 'operator', $3::text)
FROM payments WHERE reference = $1 AND state = 'refund_due'
RETURNING position
