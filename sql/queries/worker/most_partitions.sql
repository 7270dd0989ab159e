-- The most partitions that a sale was created with, 0 if there is no sale.
SELECT coalesce(max(partitions), 0) FROM sales
