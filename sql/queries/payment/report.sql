-- Keeps the report of a payment, with what was decided about it. The transaction has locked the order.
-- $1 reference, $2 the order that it names or NULL, $3 its sale, NULL if the order is not known yet
-- $4 amount and $5 currency, or NULL, $6 other data
-- $7 the type of the event that decides, or NULL to wait for the order, $8 why a refund is due, or NULL
--
-- Returns false if the reference was reported before, also in a concurrent transaction, which it waits for: nothing was changed.
-- Returns no row if the sale is archived since the order was locked: nothing was changed. Only a sale that has left Redis can
-- be, and archive/mark.sql waits for those who hold its row here.
WITH left_redis AS (
    SELECT archived_at FROM sales WHERE id = $3 AND retired_at IS NOT NULL FOR KEY SHARE
), open AS (
    SELECT WHERE NOT EXISTS (SELECT FROM left_redis WHERE archived_at IS NOT NULL)
), received AS (
    INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, data)
    SELECT $1, 1, 'PaymentReceived', $2::uuid, $3::uuid, $4::bigint, $5, $6::jsonb FROM open
    ON CONFLICT (reference, version) DO NOTHING
    RETURNING reference, order_id, sale_id, amount, currency, data
), decided AS (
    INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
    SELECT reference, 2, $7, order_id, sale_id, amount, currency, $8, data FROM received WHERE $7::text IS NOT NULL
)
SELECT (SELECT count(*) > 0 FROM received) FROM open
