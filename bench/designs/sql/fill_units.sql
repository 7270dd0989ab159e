-- Inserts the units 1 to $2 of the sale $1, unless they were inserted before: then it changes nothing.
-- The caller holds the lock on the row of the sale (lock_sale.sql), so only one process inserts.
INSERT INTO bench_units (sale_id, unit)
SELECT $1, unit FROM generate_series(1, $2::bigint) AS unit
WHERE NOT EXISTS (SELECT FROM bench_units WHERE sale_id = $1) AND NOT EXISTS (SELECT FROM orders WHERE sale_id = $1)
