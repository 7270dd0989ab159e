-- Whether the tables were made before the first release. The numbers of its migrations, 1 to 18, are given again.
SELECT to_regclass('orders') IS NOT NULL AND (to_regclass('order_months') IS NULL OR to_regclass('sale_items') IS NULL OR to_regprocedure('archive_month(date)') IS NOT NULL)
