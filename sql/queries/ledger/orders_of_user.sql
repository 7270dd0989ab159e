-- The newest $3 orders of the user $1, with ids below $2 unless that is NULL.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason
FROM orders AS o LEFT JOIN pulse AS p ON true
WHERE o.user_id = $1 AND ($2::uuid IS NULL OR o.id < $2)
ORDER BY o.id DESC
LIMIT $3
