-- The number of lasting differences by sale and remedy, the numbers of the sale's partitions and shards (0 if
-- Postgres lacks the sale), and whether its projections have to be rebuilt first.
SELECT f.sale_id, f.remedy, count(*) AS count, coalesce(s.partitions, 0) AS partitions, coalesce(s.shards, 0) AS shards,
       bool_or(f.remedy = 'projections') OVER (PARTITION BY f.sale_id) AS blocked
FROM reconcile_found AS f LEFT JOIN sales AS s ON s.id = f.sale_id
GROUP BY f.sale_id, f.remedy, s.partitions, s.shards
ORDER BY f.sale_id, f.remedy
