-- The sales to audit: $1, or all whose orders are not archived if it is NULL.
SELECT id, partitions, shards, archived_at IS NOT NULL AS archived,
       CASE WHEN items > 0 THEN ARRAY(SELECT code FROM sale_items AS i WHERE i.sale_id = sales.id ORDER BY item < 'a', item) END AS items
FROM sales
WHERE id = $1 OR $1::uuid IS NULL AND archived_at IS NULL ORDER BY id
