-- The DEFAULT partitions that keep the table of this month or of the next one from being made (make_month), as text; NULL
-- if there is none.
SELECT string_agg(DISTINCT partdefid::regclass::text, ', ')
FROM pg_partitioned_table AS p, generate_series(0, 1) AS n, first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + n * interval '1 month') AS sale
WHERE p.partrelid IN ('orders'::regclass, 'order_events'::regclass) AND p.partdefid <> 0
  AND NOT EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND CASE p.partrelid WHEN 'orders'::regclass THEN orders ELSE events END IS NOT NULL)
