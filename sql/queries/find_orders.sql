-- The orders with the ids $1, as they stand.
SELECT id, sale_id, user_id, quantity, status, version, reserved_at, coalesce(reason, '')
FROM orders
WHERE id = ANY ($1::uuid[])
