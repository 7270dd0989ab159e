-- The sales to audit: $1, or all whose orders are not archived if it is NULL.
SELECT id, partitions, shards, archived_at IS NOT NULL AS archived FROM sales
WHERE id = $1 OR $1::uuid IS NULL AND archived_at IS NULL ORDER BY id
