-- Keeps what became of the payments of the archived sale $1, which are in file_payments. A report that waits, and has the reference
-- of one of them, is a repeat: it goes.
WITH repeats AS (
    DELETE FROM payment_events AS w
    WHERE reference IN (SELECT reference FROM file_payments) AND version = 1 AND sale_id IS NULL
      AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = w.reference AND later.version = 2)
    RETURNING reference
), closed AS (
    DELETE FROM open_payments WHERE reference IN (SELECT reference FROM repeats)
)
INSERT INTO archived_payments (reference, sale_id, version, position, type, order_id, amount, currency, reason, received_at, updated_at, data)
SELECT DISTINCT ON (reference) reference, $1::uuid, version, position, type, order_id, amount, currency, reason,
       min(occurred_at) OVER (PARTITION BY reference), occurred_at, data
FROM file_payments
ORDER BY reference, version DESC
ON CONFLICT (reference) DO NOTHING
