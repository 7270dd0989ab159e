-- Decides about the waiting payment $1: $2 the sale of its order, or NULL if there is no such order, $3 the type of the event, $4
-- why a refund is due, or NULL.
-- Returns no row if it does not wait any more, or the sale was archived (report.sql); a concurrent decision fails with
-- unique_violation.
WITH left_redis AS (
    SELECT archived_at FROM sales WHERE id = $2 AND retired_at IS NOT NULL FOR KEY SHARE
)
INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
SELECT reference, version + 1, $3, order_id, $2, amount, currency, $4, data FROM payments
WHERE reference = $1 AND state = 'waiting' AND NOT EXISTS (SELECT FROM left_redis WHERE archived_at IS NOT NULL)
RETURNING position
