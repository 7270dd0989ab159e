-- Enqueues releases of those of the orders $2 of the sale $1 that have ended. Redis ignores a
-- release of an order that is not held.
INSERT INTO releases (order_id, sale_id, user_id, quantity)
SELECT o.id, o.sale_id, o.user_id, o.quantity
FROM unnest($2::uuid[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $1 AND id = wanted.id LIMIT 1) AS o -- as in find_orders.sql
WHERE NOT is_live(o.status)
ON CONFLICT (order_id) DO NOTHING
RETURNING order_id
