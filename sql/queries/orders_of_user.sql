-- The newest $3 orders of the user $1, of those with ids below $2 if that is not NULL.
SELECT id, sale_id, user_id, quantity, status, version, reserved_at,
       CASE status WHEN 'confirmed' THEN expires_at END, coalesce(payment_reference, ''), coalesce(reason, '')
FROM orders
WHERE user_id = $1 AND ($2::uuid IS NULL OR id < $2)
ORDER BY id DESC
LIMIT $3
