-- How many lasting differences there are, by sale and remedy, among how many partitions the sale lives (0 for one
-- that Postgres does not know), and whether its projections have to be made anew before anything else.
SELECT f.sale_id, f.remedy, count(*) AS count, coalesce(s.partitions, 0) AS partitions,
       bool_or(f.remedy = 'projections') OVER (PARTITION BY f.sale_id) AS blocked
FROM reconcile_found AS f LEFT JOIN sales AS s ON s.id = f.sale_id
GROUP BY f.sale_id, f.remedy, s.partitions
ORDER BY f.sale_id, f.remedy
