-- Makes the refund of the payment that settled the order $1 due: $2 why, $3 the operator who cancelled it.
INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
SELECT reference, version + 1, 'PaymentRefundDue', order_id, sale_id, amount, currency, $2, data || jsonb_build_object('operator', $3::text)
FROM payments WHERE order_id = $1 AND state = 'settled'
