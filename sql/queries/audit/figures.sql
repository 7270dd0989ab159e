-- The figures of the audited sales, one row each: the sums of their shards, and their events.
CREATE TEMP TABLE audit_figures AS
WITH shards AS (
    SELECT sale_id, bool_and(present) AS present, bool_or(gone) AS gone, bool_and(still) AS still, bool_or(changing) AS changing,
           sum(units) AS units, sum(stock) AS redis_stock,
           sum(orders)::bigint AS orders, sum(live_orders)::bigint AS live_orders, sum(live_units) AS live_units,
           sum(confirmed_units) AS confirmed_units, sum(rejected)::bigint AS rejected, sum(voided)::bigint AS voided,
           sum(buyers)::bigint AS buyers, sum(taken) AS taken, sum(held) AS held,
           coalesce(sum((places - first_sequence) / shards), 0) AS places_since
    FROM audit_shard_figures GROUP BY sale_id
), found AS (
    -- The places that orders have, of those that each shard gave out from one rebuild to the next.
    SELECT sale_id, revision, since, shards, (place + shards - 1) % shards AS shard, count(DISTINCT place) AS places, max(place) AS last
    FROM (SELECT sale_id, sequence AS place FROM orders UNION ALL SELECT sale_id, sequence FROM audit_buyers) AS known JOIN audit_rebuilds USING (sale_id)
    WHERE place > since AND place <= upto
    GROUP BY 1, 2, 3, 4, 5
), given AS (
    -- The shards of a sale have not come equally far when it is rebuilt, and all go on above the highest place. So of
    -- several shards only places below that of a later order were surely given out.
    SELECT sale_id, revision, sum(places) AS found, sum((last + shards - 1 - shard) / shards - (since + shards - 1) / shards) AS places
    FROM found GROUP BY sale_id, revision
), rebuilt AS (
    SELECT sale_id, sum(CASE shards WHEN 1 THEN greatest(upto - since, 0) ELSE coalesce(places, 0) END) AS places, coalesce(sum(found), 0) AS found
    FROM audit_rebuilds LEFT JOIN given USING (sale_id, revision) GROUP BY sale_id
), logged AS (
    -- The first row of an order has its reservation and its outcome.
    SELECT sale_id, count(*) + count(reserved_at) AS events,
           coalesce(sum(CASE type WHEN 'OrderConfirmed' THEN quantity
                                  WHEN 'OrderCancelled' THEN -quantity
                                  WHEN 'OrderExpired' THEN -quantity END), 0) AS replayed_units
    FROM order_events JOIN audit_sales USING (sale_id) GROUP BY sale_id
)
SELECT s.id AS sale_id, s.name, s.stock, s.sold, s.epoch, s.revision, s.published_revision, a.shards, a.on_the_way,
       f.orders, f.live_orders, f.live_units, CASE WHEN s.payment_window_seconds > 0 THEN f.confirmed_units ELSE 0 END AS unpaid,
       f.rejected, f.voided, coalesce(l.events, 0) AS events, coalesce(l.replayed_units, 0) AS replayed_units,
       f.buyers, f.taken, f.held,
       f.present, f.gone, f.still, f.changing,
       -- The keys of an ended sale may be deleted: unsold units are what was left.
       CASE WHEN f.gone THEN s.stock::numeric - s.sold WHEN f.present THEN f.units + a.on_the_way ELSE 0 END AS available,
       CASE WHEN f.present THEN f.redis_stock + a.on_the_way END AS redis_stock,
       CASE WHEN f.present THEN (coalesce(r.places, 0) + f.places_since)::bigint ELSE 0 END AS places, coalesce(r.places - r.found, 0)::bigint AS lost,
       before.epoch IS DISTINCT FROM s.epoch AS rebuilding
FROM audit_sales AS a JOIN sales AS s ON s.id = a.sale_id JOIN shards AS f USING (sale_id) LEFT JOIN audit_before AS before USING (sale_id)
LEFT JOIN logged AS l USING (sale_id) LEFT JOIN rebuilt AS r USING (sale_id)
