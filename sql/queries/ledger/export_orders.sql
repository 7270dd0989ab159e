-- The next $7 orders after the order $6 of the sale $5, sale by sale, and in a sale in the order in which they were made: all,
-- or those of the sale $1 and the status $2 that were reserved from $3 to before $4. Each of $1 to $4 may be NULL.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, o.sequence, o.epoch
FROM orders AS o LEFT JOIN pulse AS p ON true
WHERE ($1::uuid IS NULL OR o.sale_id = $1) AND ($2::text IS NULL OR o.status = $2)
  AND ($3::timestamptz IS NULL OR o.reserved_at >= $3) AND ($4::timestamptz IS NULL OR o.reserved_at < $4)
  AND o.sale_id >= $5 AND (o.sale_id, o.id) > ($5, $6)
ORDER BY o.sale_id, o.id
LIMIT $7
