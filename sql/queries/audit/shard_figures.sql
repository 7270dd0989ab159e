-- The figures of the shards of the audited sales, one row each, in Postgres and in Redis. Sums are numeric, because
-- forged values may exceed a bigint.
--
-- An order counts in the shard that has its place: shard s of n has the places s + 1, s + 1 + n, s + 1 + 2n and so on.
CREATE TEMP TABLE audit_shard_figures AS
WITH projected AS (
    SELECT sale_id, (sequence % shards + shards - 1) % shards AS shard, count(*) AS orders,
           count(*) FILTER (WHERE is_live(status)) AS live_orders,
           coalesce(sum(quantity) FILTER (WHERE is_live(status)), 0) AS live_units,
           coalesce(sum(quantity) FILTER (WHERE status = 'confirmed'), 0) AS confirmed_units,
           count(*) FILTER (WHERE status = 'rejected') AS rejected,
           count(*) FILTER (WHERE status = 'voided') AS voided,
           max(sequence) FILTER (WHERE status <> 'voided') AS last_place
    FROM orders JOIN audit_sales USING (sale_id) GROUP BY sale_id, 2
), bought AS (
    -- Held: units without an order in Postgres yet, and those that await their release.
    SELECT b.sale_id, b.shard, count(*) AS buyers, sum(b.quantity) AS taken,
           coalesce(sum(b.quantity) FILTER (WHERE o.id IS NULL OR r.order_id IS NOT NULL), 0) AS held
    FROM audit_buyers AS b LEFT JOIN orders AS o ON o.sale_id = b.sale_id AND o.id = b.order_id LEFT JOIN releases AS r ON r.order_id = b.order_id
    GROUP BY b.sale_id, b.shard
), rebuilt AS (
    SELECT sale_id, max(upto) AS rebuilt_to FROM audit_rebuilds GROUP BY sale_id
)
SELECT a.*, sales.shards,
       coalesce(p.orders, 0) AS orders, coalesce(p.live_orders, 0) AS live_orders, coalesce(p.live_units, 0) AS live_units,
       coalesce(p.confirmed_units, 0) AS confirmed_units, coalesce(p.rejected, 0) AS rejected, coalesce(p.voided, 0) AS voided,
       coalesce(p.last_place, 0) AS last_place,
       -- The next place when the shard was read, and after the snapshot.
       coalesce(a.places, a.shard)::numeric + 1 AS read_place, coalesce(a.latest, a.places, a.shard)::numeric + 1 AS next_place,
       coalesce(b.buyers, 0) AS buyers, coalesce(b.taken, 0) AS taken, coalesce(b.held, 0) AS held,
       coalesce(r.rebuilt_to, 0) AS rebuilt_to,
       -- Its sequence when it had given out no place since then (Layout.FirstSequence).
       (coalesce(r.rebuilt_to, 0) + sales.shards - 1) / sales.shards * sales.shards + a.shard AS first_sequence,
       -- The keys of an ended sale may be deleted.
       NOT a.present AND (s.state = 'ended' OR coalesce(s.closes_at <= now(), false)) AS gone,
       -- Redis had all changes that were published before the look, and Postgres has more since: a
       -- difference may be one of those.
       a.revision BETWEEN coalesce(before.published_revision, 0) AND log.last AND (a.revision < log.last OR s.published_revision < log.last) AS changing
FROM audit_shards AS a JOIN audit_sales AS sales USING (sale_id) JOIN sales AS s ON s.id = a.sale_id LEFT JOIN audit_before AS before USING (sale_id)
CROSS JOIN LATERAL (SELECT least(max(e.revision), s.revision) AS last FROM sale_events AS e WHERE e.sale_id = s.id) AS log
LEFT JOIN projected AS p USING (sale_id, shard) LEFT JOIN bought AS b USING (sale_id, shard) LEFT JOIN rebuilt AS r USING (sale_id)
