-- The newest $3 orders of the user $1, with ids below $2 unless that is NULL. The user's live orders, at most one per
-- sale, and ended orders have separate indexes.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason
FROM (
    SELECT * FROM orders
    WHERE user_id = $1 AND status IN ('confirmed', 'paid') AND ($2::uuid IS NULL OR id < $2)
    UNION ALL
    (SELECT * FROM orders
     WHERE user_id = $1 AND status NOT IN ('confirmed', 'paid') AND ($2::uuid IS NULL OR id < $2)
     ORDER BY id DESC
     LIMIT $3)
) AS o LEFT JOIN pulse AS p ON true
ORDER BY o.id DESC
LIMIT $3
