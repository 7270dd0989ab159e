-- S7: sales that Redis has lost or has in an older state than Postgres.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN NOT present AND published_revision = 0 THEN 'the sale has not been published to Redis'
            WHEN NOT present THEN 'Redis has lost the sale: nothing is sold until it is rebuilt from Postgres'
            WHEN redis_epoch = 0 THEN format('Redis has the sale closed for a rebuild, Postgres is in epoch %s', epoch)
            WHEN redis_epoch <> epoch THEN format('Redis has the stock of epoch %s, Postgres is in epoch %s', redis_epoch, epoch)
            ELSE format('Redis has given out %s places, and Postgres has an order at place %s: Redis was set back', latest, last_place)
       END AS what,
       CASE WHEN NOT present AND published_revision = 0 OR rebuilding THEN 'worker' ELSE 'rebuild' END AS remedy,
       CASE WHEN NOT present THEN 'lost' WHEN redis_epoch <> epoch THEN format('epochs %s %s', redis_epoch, epoch) ELSE format('place %s', last_place) END AS same
FROM audit_figures
WHERE NOT gone AND (NOT present OR redis_epoch <> epoch OR latest < last_place)
UNION ALL
-- The definition in Redis. An unpublished revision is in transit.
SELECT f.sale_id, NULL, NULL, 'Redis has another definition of the sale than Postgres: ' || d.differences,
       CASE WHEN f.changing THEN 'worker' ELSE 'rebuild' END, d.differences
FROM audit_figures AS f JOIN audit_sales AS a USING (sale_id) JOIN sales AS s ON s.id = f.sale_id
CROSS JOIN LATERAL (
    SELECT string_agg(format('%s is %s and not %s', field, redis, postgres), ', ') AS differences
    FROM (VALUES
        ('state', a.state, s.state),
        ('opens_at_ms', a.opens_at_ms::text, CASE WHEN isfinite(s.opens_at) IS FALSE THEN s.opens_at::text ELSE floor(extract(epoch FROM coalesce(s.opens_at, to_timestamp(0))) * 1000)::text END),
        ('closes_at_ms', a.closes_at_ms::text, CASE WHEN isfinite(s.closes_at) IS FALSE THEN s.closes_at::text ELSE floor(extract(epoch FROM coalesce(s.closes_at, to_timestamp(0))) * 1000)::text END),
        ('per_order_limit', a.per_order_limit::text, s.per_order_limit::text),
        ('payment_window_s', a.payment_window_s::text, s.payment_window_seconds::text),
        ('revision', a.revision::text, s.revision::text)
    ) AS terms (field, redis, postgres)
    WHERE redis <> postgres
) AS d
WHERE f.present AND a.epoch = f.epoch AND d.differences IS NOT NULL
