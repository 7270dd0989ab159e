-- The sale of a file, after tables.sql, and whichever other ones its events name. It is in no Redis.
INSERT INTO audit_sales (sale_id, shards, items, unread, on_the_way)
SELECT coalesce(id, sale_id), 1, coalesce(items, 0), true, 0
FROM (SELECT * FROM sales WHERE archived_at IS NULL) AS s FULL JOIN (SELECT DISTINCT sale_id FROM order_events) AS e ON sale_id = id;
INSERT INTO audit_shards (sale_id, shard, label, present) SELECT sale_id, 0, '', false FROM audit_sales
