-- The buyers, once for each shard, with an index and statistics for the planner. Buyers who came after the
-- shard was read are left out, unless their place was still not assigned a while later: those are
-- forged.
CREATE TEMP TABLE audit_buyers AS
SELECT DISTINCT ON (b.sale_id, b.shard, b.user_id) b.*, b.sequence > coalesce(a.latest, a.places) AS beyond
FROM audit_scan AS b JOIN audit_shards AS a USING (sale_id, shard)
WHERE NOT b.late OR b.sequence > coalesce(a.latest, a.places)
ORDER BY b.sale_id, b.shard, b.user_id;
CREATE INDEX ON audit_buyers (order_id);
CREATE INDEX ON audit_waiting (order_id);
ANALYZE audit_buyers, audit_sales, audit_shards, audit_items, audit_waiting, audit_ended;
