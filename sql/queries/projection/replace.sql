-- Writes the wrong rows as the log has them by now. Whoever waits for a row gets it as it is then. The caller puts
-- replay.sql where the braces are.
-- $1, $2 the sales from $1 to before $2
WITH replayed AS (
{{replay}}
)
INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
                    reason, due, pay_from, payment_reference, key_fingerprint, lines)
SELECT id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
       reason, due, pay_from, payment_reference, key_fingerprint, lines
FROM replayed JOIN wrong_orders USING (sale_id, id)
ON CONFLICT (sale_id, id) DO UPDATE SET (user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
                                         reason, due, pay_from, payment_reference, key_fingerprint, lines)
    = (excluded.user_id, excluded.quantity, excluded.status, excluded.version, excluded.sequence, excluded.epoch, excluded.reserved_at, excluded.updated_at,
       excluded.reason, excluded.due, excluded.pay_from, excluded.payment_reference, excluded.key_fingerprint, excluded.lines)
