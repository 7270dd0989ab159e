-- Makes sure that the tables for the sales of this month and the next one exist.
SELECT make_month(first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + n * interval '1 month')) FROM generate_series(0, 1) AS n
