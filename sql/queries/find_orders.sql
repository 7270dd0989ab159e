-- The orders with the ids $1, as they stand.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at,
       CASE o.status WHEN 'confirmed' THEN o.due + p.lost END, coalesce(o.payment_reference, ''), coalesce(o.reason, '')
FROM orders AS o CROSS JOIN pulse AS p
WHERE o.id = ANY ($1::uuid[])
