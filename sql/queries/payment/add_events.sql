-- Adds events of payments, as columns: $1 reference, $2 version, $3 type, $4 order or NULL, $5 sale or NULL, $6 amount or NULL, $7 currency or
-- NULL, $8 reason or NULL, $9 other data. The transaction has locked the orders.
--
-- Returns the position and the time of each, in their order.
-- Fails with
--   unique_violation      a payment has an event of this version since it was read
--   not_null_violation    the sale was archived since its order was locked: only one that has left Redis can be, and archive/mark.sql
--                         waits for those who hold its row here
WITH left_redis AS MATERIALIZED (
    SELECT id, archived_at FROM sales WHERE id = ANY ($5::uuid[]) AND retired_at IS NOT NULL FOR KEY SHARE
)
INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
SELECT CASE WHEN NOT EXISTS (SELECT FROM left_redis WHERE id = sale_id AND archived_at IS NOT NULL) THEN reference END,
       version, type, order_id, sale_id, amount, currency, reason, data
FROM unnest($1::text[], $2::integer[], $3::text[], $4::uuid[], $5::uuid[], $6::bigint[], $7::text[], $8::text[], $9::jsonb[])
    WITH ORDINALITY AS e (reference, version, type, order_id, sale_id, amount, currency, reason, data, place)
ORDER BY place
RETURNING position, occurred_at
