-- Has a worker give back the units of the orders $2 of the sale $1, those of them that have ended. Redis knows
-- by the order whether there is anything to give back.
INSERT INTO releases (order_id, sale_id, user_id, quantity)
SELECT id, sale_id, user_id, quantity FROM orders
WHERE sale_id = $1 AND id = ANY ($2::uuid[]) AND status NOT IN ('confirmed', 'paid')
ON CONFLICT DO NOTHING
RETURNING order_id
