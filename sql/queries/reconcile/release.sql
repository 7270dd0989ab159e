-- Enqueues releases of those of the orders $2 of the sale $1 that have ended. Redis ignores a
-- release of an order that is not held.
INSERT INTO releases (order_id, sale_id, user_id, quantity)
SELECT id, sale_id, user_id, quantity FROM orders
WHERE sale_id = $1 AND id = ANY ($2::uuid[]) AND status NOT IN ('confirmed', 'paid')
ON CONFLICT DO NOTHING
RETURNING order_id
