-- The orders of the sale $1 with the ids $2.
--
-- LATERAL and LIMIT make Postgres look for each of them by the index. In the first minute of a sale it has no statistics, and would
-- read all orders of the sale, by a plan that it keeps from when the tables were empty.
SELECT {{columns/order}}
FROM unnest($2::uuid[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $1 AND id = wanted.id LIMIT 1) AS o
LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = $1
