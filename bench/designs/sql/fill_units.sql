-- Puts the units 1 to $2 of the sale $1 on sale, unless they were before: then what is left is left alone.
-- A sale has its row locked (lock_sale.sql), so that one process does it.
INSERT INTO bench_units (sale_id, unit)
SELECT $1, unit FROM generate_series(1, $2::bigint) AS unit
WHERE NOT EXISTS (SELECT FROM bench_units WHERE sale_id = $1) AND NOT EXISTS (SELECT FROM orders WHERE sale_id = $1)
