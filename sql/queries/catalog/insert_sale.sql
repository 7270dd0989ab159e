-- Creates a sale, its items and its first event.
-- $1 id, $2 name, $3 stock, $4 per_order_limit, $5 opens_at, $6 closes_at, $7 payment_window_seconds, $8 partitions,
-- $9 idempotency key or null, $10 shards, $11 the operator or null, $12 payment_grace_seconds, $13 payments_per_second,
-- $14 unit_price and $15 currency, or null; $16 the items in their order, or null. The first event of a sale with items has
-- a type of its own, so that a version that does not know items does not publish the sale.
-- Returns: its epoch, revision and time of creation; no row if a sale was created with this idempotency key, also in
-- a concurrent transaction.
WITH sale AS (
    INSERT INTO sales (id, name, stock, per_order_limit, opens_at, closes_at, payment_window_seconds, partitions, idempotency_key, shards,
                       payment_grace_seconds, payments_per_second, unit_price, currency, items)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $12, $13, $14, $15, coalesce(jsonb_array_length($16::jsonb), 0))
    ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, stock, shards, epoch, revision, created_at, items
), its_items AS (
    INSERT INTO sale_items (sale_id, item, code, name, unit_price, per_order_limit, stock)
    SELECT id, substr('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ', n::integer, 1),
           item ->> 'code', item ->> 'name', (item ->> 'unit_price')::bigint, (item ->> 'per_order_limit')::bigint, (item ->> 'stock')::bigint
    FROM sale, jsonb_array_elements($16::jsonb) WITH ORDINALITY AS known (item, n)
), created AS (
    INSERT INTO sale_events (sale_id, revision, type, data, operator)
    SELECT id, revision, CASE WHEN items > 0 THEN 'SaleWithItemsCreated' ELSE 'SaleCreated' END,
           jsonb_strip_nulls(jsonb_build_object('stock', stock, 'shards', nullif(shards, 1), 'items', $16::jsonb)), $11
    FROM sale
)
SELECT epoch, revision, created_at FROM sale
