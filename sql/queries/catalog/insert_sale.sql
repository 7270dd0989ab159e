-- Creates a sale and its first event.
-- $1 id, $2 name, $3 stock, $4 per_order_limit, $5 opens_at, $6 closes_at, $7 payment_window_seconds, $8 partitions,
-- $9 idempotency key or null, $10 shards, $11 the operator or null, $12 payment_grace_seconds, $13 payments_per_second,
-- $14 unit_price and $15 currency, or null
-- Returns: its epoch, revision and time of creation; no row if a sale was created with this idempotency key, also in
-- a concurrent transaction.
WITH sale AS (
    INSERT INTO sales (id, name, stock, per_order_limit, opens_at, closes_at, payment_window_seconds, partitions, idempotency_key, shards,
                       payment_grace_seconds, payments_per_second, unit_price, currency)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $12, $13, $14, $15)
    ON CONFLICT (idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, stock, shards, epoch, revision, created_at
), created AS (
    INSERT INTO sale_events (sale_id, revision, type, data, operator)
    SELECT id, revision, 'SaleCreated', jsonb_strip_nulls(jsonb_build_object('stock', stock, 'shards', nullif(shards, 1))), $11 FROM sale
)
SELECT epoch, revision, created_at FROM sale
