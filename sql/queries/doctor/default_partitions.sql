-- The DEFAULT partitions of the tables by month, with their tables.
SELECT partrelid::regclass::text AS parent, partdefid::regclass::text AS part
FROM pg_partitioned_table
WHERE partrelid IN (to_regclass('orders'), to_regclass('order_events')) AND partdefid <> 0
ORDER BY parent
