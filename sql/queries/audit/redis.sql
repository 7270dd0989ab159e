-- S7: sales that Redis has lost or has in an older state than Postgres.
SELECT f.sale_id, NULL::uuid AS order_id, NULL AS user_id,
       a.label || CASE
            WHEN NOT a.present AND f.published_revision = 0 THEN 'the sale has not been published to Redis'
            WHEN NOT a.present AND a.shards > 1 THEN 'Redis has lost it: nothing is sold to its users until the sale is rebuilt from Postgres'
            WHEN NOT a.present THEN 'Redis has lost the sale: nothing is sold until it is rebuilt from Postgres'
            WHEN a.epoch = 0 THEN format('Redis has the sale closed for a rebuild, Postgres is in epoch %s', f.epoch)
            WHEN a.epoch <> f.epoch THEN format('Redis has the stock of epoch %s, Postgres is in epoch %s', a.epoch, f.epoch)
            WHEN a.shards > 1 THEN format('the next place is %s, and Postgres has an order at place %s: Redis was set back', a.next_place, a.last_place)
            ELSE format('Redis has given out %s places, and Postgres has an order at place %s: Redis was set back', a.next_place - 1, a.last_place)
       END AS what,
       CASE WHEN NOT a.present AND f.published_revision = 0 OR f.rebuilding THEN 'worker' ELSE 'rebuild' END AS remedy,
       a.label || CASE WHEN NOT a.present THEN 'lost' WHEN a.epoch <> f.epoch THEN format('epochs %s %s', a.epoch, f.epoch) ELSE format('place %s', a.last_place) END AS same
FROM audit_shard_figures AS a JOIN audit_figures AS f USING (sale_id)
WHERE NOT a.gone AND (NOT a.present OR a.epoch <> f.epoch OR a.next_place <= a.last_place)
UNION ALL
-- The definition in Redis. An unpublished revision is in transit.
SELECT a.sale_id, NULL, NULL, a.label || 'Redis has another definition of the sale than Postgres: ' || its.differences,
       CASE WHEN a.changing THEN 'worker' ELSE 'rebuild' END, a.label || its.differences
FROM audit_shard_figures AS a JOIN sales AS s ON s.id = a.sale_id LEFT JOIN draws AS d USING (sale_id)
CROSS JOIN LATERAL (
    SELECT string_agg(format('%s is %s and not %s', field, redis, postgres), ', ') AS differences
    FROM (VALUES
        -- A waiting list gets the units that return when none are left, unless it is closed and nobody waits.
        ('state', a.state, CASE WHEN s.state <> 'open' OR (d.kind = 'waitlist') IS NOT TRUE AND NOT s.offers_only THEN s.state WHEN s.offers_only OR a.state = 'offers' THEN 'offers'
            WHEN a.state = 'open' AND (SELECT e.state FROM sales AS e WHERE e.id = d.entries_id) = 'ended' THEN 'open' ELSE 'waitlist' END),
        ('opens_at_ms', a.opens_at_ms::text, CASE WHEN isfinite(s.opens_at) IS FALSE THEN s.opens_at::text ELSE floor(extract(epoch FROM coalesce(s.opens_at, to_timestamp(0))) * 1000)::text END),
        ('closes_at_ms', a.closes_at_ms::text, CASE WHEN isfinite(s.closes_at) IS FALSE THEN s.closes_at::text ELSE floor(extract(epoch FROM coalesce(s.closes_at, to_timestamp(0))) * 1000)::text END),
        ('per_order_limit', a.per_order_limit::text, CASE WHEN s.items > 0 THEN '0' ELSE s.per_order_limit::text END),
        ('limit', a.order_limit::text, s.per_order_limit::text),
        ('payment_window_s', a.payment_window_s::text, s.payment_window_seconds::text),
        ('revision', a.revision::text, s.revision::text)
    ) AS terms (field, redis, postgres)
    WHERE redis <> postgres
) AS its
WHERE a.present AND a.epoch = s.epoch AND its.differences IS NOT NULL
UNION ALL
SELECT i.sale_id, NULL, NULL, f.label || format('Redis has another limit of the item %s than Postgres: %s and not %s', code, a.per_order_limit, coalesce(i.per_order_limit, 0)),
       CASE WHEN changing THEN 'worker' ELSE 'rebuild' END, f.label || format('limit of %s', code)
FROM audit_items AS a JOIN audit_shard_figures AS f USING (sale_id, shard) JOIN sale_items AS i USING (sale_id, item)
WHERE f.present AND f.epoch > 0 AND a.per_order_limit <> coalesce(i.per_order_limit, 0)
