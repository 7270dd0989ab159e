-- S3: accepted in Redis, and without an order in Postgres.
SELECT b.sale_id, b.order_id, b.user_id, 'the order was accepted and is not in Postgres' AS what,
       CASE WHEN EXISTS (SELECT FROM audit_waiting AS w WHERE w.order_id = b.order_id AND NOT parked) THEN 'worker'
            WHEN EXISTS (SELECT FROM audit_waiting AS w WHERE w.order_id = b.order_id) THEN 'dlq'
            -- Its event would count as already recorded.
            WHEN EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = b.sale_id AND e.order_id = b.order_id) THEN 'projections'
            WHEN a.epoch = 0 THEN 'rebuild'
            ELSE 'append' END AS remedy
FROM audit_buyers AS b JOIN audit_shards AS a USING (sale_id, shard)
WHERE NOT EXISTS (SELECT FROM orders AS o WHERE o.sale_id = b.sale_id AND o.id = b.order_id)
