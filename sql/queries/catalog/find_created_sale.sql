-- The sale that was created with the idempotency key $1: its id, and the stock and the shards that it began with.
SELECT s.id, (e.data ->> 'stock')::bigint, coalesce((e.data ->> 'shards')::integer, 1)
FROM sales AS s JOIN sale_events AS e ON e.sale_id = s.id AND e.type = 'SaleCreated'
WHERE s.idempotency_key = $1
