-- Why the sale $1 cannot be archived; no row if it can be. $2 the seconds since its end and its last change, and $3 the
-- time to which clocks agree that it is, because this one may have been set ahead since; NULL: without that.
WITH last AS (
    SELECT greatest((SELECT max(occurred_at) FROM order_events WHERE sale_id = $1),
                    (SELECT max(occurred_at) FROM payment_events WHERE sale_id = $1),
                    (SELECT max(occurred_at) FROM sale_events WHERE sale_id = $1 AND type = 'SaleEnded'),
                    (SELECT closes_at FROM sales WHERE id = $1 AND closes_at <= now())) AS changed_at
)
SELECT reason FROM sale_in_use($1)
UNION ALL
SELECT format('its last change was at %s', to_char(changed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
FROM last WHERE changed_at > least(now(), $3) - make_interval(secs => $2)
UNION ALL
-- The file would not have them.
SELECT format('%s orders have no events: `stampede audit` names them', n)
FROM (SELECT count(*) AS n FROM orders AS o WHERE o.sale_id = $1 AND NOT EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = $1 AND e.order_id = o.id)) AS lost
WHERE n > 0
