-- The figures of the audited sales, one row each, in Postgres and in Redis. Sums are numeric,
-- because forged values may exceed a bigint.
CREATE TEMP TABLE audit_figures AS
WITH projected AS (
    SELECT sale_id, count(*) AS orders,
           count(*) FILTER (WHERE status IN ('confirmed', 'paid')) AS live_orders,
           coalesce(sum(quantity) FILTER (WHERE status IN ('confirmed', 'paid')), 0) AS live_units,
           coalesce(sum(quantity) FILTER (WHERE status = 'confirmed'), 0) AS confirmed_units,
           count(*) FILTER (WHERE status = 'rejected') AS rejected,
           count(*) FILTER (WHERE status = 'voided') AS voided,
           max(sequence) FILTER (WHERE status <> 'voided') AS last_place
    FROM orders JOIN audit_sales USING (sale_id) GROUP BY sale_id
), logged AS (
    -- The first row of an order has its reservation and its outcome.
    SELECT sale_id, count(*) + count(reserved_at) AS events,
           coalesce(sum(CASE type WHEN 'OrderConfirmed' THEN quantity
                                  WHEN 'OrderCancelled' THEN -quantity
                                  WHEN 'OrderExpired' THEN -quantity END), 0) AS replayed_units
    FROM order_events JOIN audit_sales USING (sale_id) GROUP BY sale_id
), bought AS (
    -- Held: units without an order in Postgres yet, and those that await their release.
    SELECT b.sale_id, count(*) AS buyers, sum(b.quantity) AS taken,
           coalesce(sum(b.quantity) FILTER (WHERE o.id IS NULL OR r.order_id IS NOT NULL), 0) AS held
    FROM audit_buyers AS b LEFT JOIN orders AS o ON o.sale_id = b.sale_id AND o.id = b.order_id LEFT JOIN releases AS r ON r.order_id = b.order_id
    GROUP BY b.sale_id
), rebuilt AS (
    -- Up to here the places of a sale may lack orders, which were lost with Redis.
    SELECT sale_id, max(CASE WHEN data ->> 'sequence' ~ '^\d{1,15}$' THEN (data ->> 'sequence')::bigint ELSE 0 END) AS rebuilt_to
    FROM sale_events JOIN audit_sales USING (sale_id) WHERE type = 'SaleRebuilt' GROUP BY sale_id
), found AS (
    SELECT sale_id, count(DISTINCT place) AS places
    FROM (SELECT sale_id, sequence AS place FROM orders UNION ALL SELECT sale_id, sequence FROM audit_buyers) AS known JOIN rebuilt USING (sale_id)
    WHERE place BETWEEN 1 AND rebuilt_to
    GROUP BY sale_id
)
SELECT s.id AS sale_id, s.name, s.stock, s.sold, s.epoch, s.revision, s.published_revision,
       coalesce(p.orders, 0) AS orders, coalesce(p.live_orders, 0) AS live_orders, coalesce(p.live_units, 0) AS live_units,
       CASE WHEN s.payment_window_seconds > 0 THEN coalesce(p.confirmed_units, 0) ELSE 0 END AS unpaid,
       coalesce(p.rejected, 0) AS rejected, coalesce(p.voided, 0) AS voided, coalesce(p.last_place, 0) AS last_place,
       coalesce(l.events, 0) AS events, coalesce(l.replayed_units, 0) AS replayed_units,
       coalesce(b.buyers, 0) AS buyers, coalesce(b.taken, 0) AS taken, coalesce(b.held, 0) AS held,
       -- The keys of an ended sale may be deleted: unsold units are what was left.
       a.present, NOT a.present AND over.over AS gone, CASE WHEN NOT a.present AND over.over THEN s.stock::numeric - s.sold ELSE coalesce(a.units, 0) END AS available, coalesce(a.places, 0) AS places, coalesce(a.latest, a.places, 0) AS latest,
       a.epoch AS redis_epoch, a.stock AS redis_stock, a.still,
       -- Redis had all changes that were published before the look, and Postgres has more since: a
       -- difference may be one of those.
       a.revision BETWEEN coalesce(before.published_revision, 0) AND log.last AND (a.revision < log.last OR s.published_revision < log.last) AS changing,
       before.epoch IS DISTINCT FROM s.epoch AS rebuilding,
       coalesce(r.rebuilt_to, 0) AS rebuilt_to, coalesce(r.rebuilt_to - coalesce(f.places, 0), 0) AS lost
FROM audit_sales AS a JOIN sales AS s ON s.id = a.sale_id LEFT JOIN audit_before AS before USING (sale_id)
CROSS JOIN LATERAL (SELECT least(max(e.revision), s.revision) AS last FROM sale_events AS e WHERE e.sale_id = s.id) AS log
CROSS JOIN LATERAL (SELECT s.state = 'ended' OR coalesce(s.closes_at <= now(), false)) AS over (over)
LEFT JOIN projected AS p USING (sale_id) LEFT JOIN logged AS l USING (sale_id) LEFT JOIN bought AS b USING (sale_id)
LEFT JOIN rebuilt AS r USING (sale_id) LEFT JOIN found AS f USING (sale_id)
