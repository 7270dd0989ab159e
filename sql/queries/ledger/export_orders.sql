-- All orders, or those of the sale $1, the user $2 and the status $3 that were reserved from $4 to before $5; each of these may
-- be NULL. Sale by sale, and in a sale in the order in which they were made.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, o.sequence, o.epoch
FROM orders AS o LEFT JOIN pulse AS p ON true
WHERE ($1::uuid IS NULL OR o.sale_id = $1) AND ($2::text IS NULL OR o.user_id = $2) AND ($3::text IS NULL OR o.status = $3)
  AND ($4::timestamptz IS NULL OR o.reserved_at >= $4) AND ($5::timestamptz IS NULL OR o.reserved_at < $5)
ORDER BY o.sale_id, o.id
