-- The first sale after $1 that has orders.
SELECT sale_id FROM orders WHERE sale_id > $1 ORDER BY sale_id LIMIT 1
