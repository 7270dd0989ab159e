-- The months of orders that have all their tables, oldest first: the lowest id of a sale in them and that of the next
-- month. What lies between them is a month, too, if there are DEFAULT partitions.
WITH months AS (SELECT first, until FROM order_months WHERE orders IS NOT NULL AND events IS NOT NULL)
SELECT first, until FROM months
UNION ALL
SELECT until, next FROM (
    SELECT until, lead(first) OVER (ORDER BY first NULLS FIRST) AS next
    FROM (TABLE months UNION ALL VALUES (NULL::uuid, '00000000-0000-0000-0000-000000000000'::uuid), ('ffffffff-ffff-ffff-ffff-ffffffffffff', NULL)) AS every (first, until)
) AS gaps
WHERE until < next AND EXISTS (SELECT FROM pg_partitioned_table WHERE partrelid IN ('orders'::regclass, 'order_events'::regclass) AND partdefid <> 0)
ORDER BY first
