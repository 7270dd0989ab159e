-- The figures of the shards of the audited sales, one row each, in Postgres and in Redis. Sums are numeric, because
-- forged values may exceed a bigint.
--
-- An order counts in the shard that has its place: shard s of n has the places s + 1, s + 1 + n, s + 1 + 2n and so on.
CREATE TEMP TABLE audit_shard_figures AS
WITH projected AS (
    SELECT sale_id, (sequence % shards + shards - 1) % shards AS shard, count(*) AS orders,
           count(*) FILTER (WHERE status IN ('confirmed', 'paid')) AS live_orders,
           coalesce(sum(quantity) FILTER (WHERE status IN ('confirmed', 'paid')), 0) AS live_units,
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
), rebuilds AS (
    -- Up to each of them the places of a sale may lack orders, which were lost with Redis.
    SELECT sale_id, shards, upto, lag(upto, 1, 0::bigint) OVER (PARTITION BY sale_id ORDER BY upto) AS since
    FROM (
        SELECT DISTINCT sale_id, shards, CASE WHEN data ->> 'sequence' ~ '^\d{1,15}$' THEN (data ->> 'sequence')::bigint ELSE 0 END AS upto
        FROM sale_events JOIN audit_sales USING (sale_id) WHERE type = 'SaleRebuilt'
    ) AS known
), rebuilt AS (
    SELECT sale_id, max(upto) AS rebuilt_to FROM rebuilds GROUP BY sale_id
), found AS (
    -- The places that orders have, of those that each shard gave out between two rebuilds.
    SELECT sale_id, shards, (place + shards - 1) % shards AS shard, since, count(DISTINCT place) AS places, max(place) AS last
    FROM (SELECT sale_id, sequence AS place FROM orders UNION ALL SELECT sale_id, sequence FROM audit_buyers) AS known JOIN rebuilds USING (sale_id)
    WHERE place > since AND place <= upto
    GROUP BY sale_id, shards, 3, since
), given AS (
    -- The shards of a sale have not come equally far when it is rebuilt, and then begin above the highest place. So of
    -- several shards only places below that of a later order were surely given out.
    SELECT sale_id, shard, sum(places) AS found, sum((last + shards - 1 - shard) / shards - (since + shards - 1 - shard) / shards) AS places
    FROM found GROUP BY sale_id, shard
)
SELECT a.*, sales.shards,
       coalesce(p.orders, 0) AS orders, coalesce(p.live_orders, 0) AS live_orders, coalesce(p.live_units, 0) AS live_units,
       coalesce(p.confirmed_units, 0) AS confirmed_units, coalesce(p.rejected, 0) AS rejected, coalesce(p.voided, 0) AS voided,
       coalesce(p.last_place, 0) AS last_place,
       -- The next place when the shard was read, and after the snapshot.
       coalesce(a.places, a.shard)::numeric + 1 AS read_place, coalesce(a.latest, a.places, a.shard)::numeric + 1 AS next_place,
       coalesce(b.buyers, 0) AS buyers, coalesce(b.taken, 0) AS taken, coalesce(b.held, 0) AS held,
       coalesce(r.rebuilt_to, 0) AS rebuilt_to, coalesce(g.found, 0) AS found_to,
       CASE sales.shards WHEN 1 THEN coalesce(r.rebuilt_to, 0) ELSE coalesce(g.places, 0) END AS given_to,
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
LEFT JOIN given AS g USING (sale_id, shard)
