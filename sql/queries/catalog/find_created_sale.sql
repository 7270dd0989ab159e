-- The sale that was created with the idempotency key $1: its id, and the name, the stock, the shards
-- and the items that it began with.
SELECT s.id, coalesce((
           SELECT r.data ->> 'previous_name' FROM sale_events AS r WHERE r.sale_id = s.id AND r.data ? 'previous_name'
           ORDER BY r.revision LIMIT 1), s.name),
       (e.data ->> 'stock')::bigint, coalesce((e.data ->> 'shards')::integer, 1), e.data -> 'items'
FROM sales AS s JOIN sale_events AS e ON e.sale_id = s.id AND e.type IN ('SaleCreated', 'SaleWithItemsCreated')
WHERE s.idempotency_key = $1
