-- The next $4 differences of the sale $1 with the remedy $2 after the number $3, and the reservation of each with its
-- shard.
SELECT DISTINCT ON (f.n) f.n, f.order_id, coalesce(f.user_id, '') AS user_id, coalesce(b.quantity, 0) AS quantity, coalesce(b.lines, '') AS lines,
       coalesce(b.shard, 0) AS shard, coalesce(b.epoch, s.epoch) AS epoch, coalesce(b.reserved_at, 'epoch') AS reserved_at
FROM reconcile_found AS f JOIN sales AS s ON s.id = f.sale_id
LEFT JOIN audit_buyers AS b ON b.order_id = f.order_id AND b.sale_id = f.sale_id AND b.user_id = f.user_id
WHERE f.sale_id = $1 AND f.remedy = $2 AND f.n > $3 AND f.order_id IS NOT NULL
ORDER BY f.n, b.shard LIMIT $4
