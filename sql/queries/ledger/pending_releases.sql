-- The number of releases, counted up to $1; and one that Redis has refused, with its sale, if there is one.
SELECT (SELECT count(*) FROM (SELECT FROM releases LIMIT $1) AS counted), r.order_id, r.sale_id
FROM (VALUES (1)) AS one LEFT JOIN LATERAL (SELECT order_id, sale_id FROM releases WHERE refusals > 0 LIMIT 1) AS r ON true
