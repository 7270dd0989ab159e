-- The sales to audit: $1, or all if it is NULL.
SELECT id, partitions FROM sales WHERE $1::uuid IS NULL OR id = $1 ORDER BY id
