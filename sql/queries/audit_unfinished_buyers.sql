-- S3: accepted in Redis, and without an order in Postgres.
SELECT b.sale_id, b.order_id, b.user_id, 'the order was accepted and is not in Postgres' AS what
FROM audit_buyers AS b
WHERE NOT EXISTS (SELECT FROM orders AS o WHERE o.id = b.order_id)
