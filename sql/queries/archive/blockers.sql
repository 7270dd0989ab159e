-- Why the sale $1 cannot be archived; no row if it can be. $2 the seconds since its end and its last change.
WITH last AS (
    SELECT greatest((SELECT max(occurred_at) FROM order_events WHERE sale_id = $1),
                    (SELECT max(occurred_at) FROM payment_events WHERE sale_id = $1),
                    (SELECT max(occurred_at) FROM sale_events WHERE sale_id = $1 AND type = 'SaleEnded'),
                    (SELECT closes_at FROM sales WHERE id = $1 AND closes_at <= now())) AS changed_at
)
SELECT reason FROM sale_in_use($1)
UNION ALL
SELECT format('its last change was at %s', to_char(changed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
FROM last WHERE changed_at > now() - make_interval(secs => $2)
UNION ALL
SELECT format('its orders are the entries of the sale %s, whose units are offered', d.sale_id)
FROM draws AS d JOIN sales AS g ON g.id = d.sale_id
WHERE d.entries_id = $1 AND d.voided_at IS NULL AND g.state <> 'ended' AND (g.closes_at <= now()) IS NOT TRUE
UNION ALL
-- The file would not have them.
SELECT format('%s orders have no events: `stampede audit` names them', n)
FROM (SELECT count(*) AS n FROM orders AS o WHERE o.sale_id = $1 AND NOT EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = $1 AND e.order_id = o.id)) AS lost
WHERE n > 0
