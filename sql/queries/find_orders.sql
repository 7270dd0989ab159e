-- The orders with the ids $1, as they stand.
SELECT id, sale_id, user_id, quantity, status, version, reserved_at,
       CASE status WHEN 'confirmed' THEN expires_at END, coalesce(payment_reference, ''), coalesce(reason, '')
FROM orders
WHERE id = ANY ($1::uuid[])
