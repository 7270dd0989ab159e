-- Why the sale $1 cannot be archived; no row if it can be. $2 the seconds since its end and its last change.
WITH sale AS (
    SELECT *, state = 'ended' OR coalesce(closes_at <= now(), false) AS over FROM sales WHERE id = $1
), last AS (
    SELECT greatest((SELECT max(position) FROM order_events WHERE sale_id = $1), (SELECT max(position) FROM sale_events WHERE sale_id = $1)) AS position,
           greatest((SELECT max(occurred_at) FROM order_events WHERE sale_id = $1),
                    (SELECT max(occurred_at) FROM sale_events WHERE sale_id = $1 AND type = 'SaleEnded'),
                    (SELECT closes_at FROM sale WHERE closes_at <= now())) AS changed_at
)
SELECT 'it is not over' FROM sale WHERE NOT over
UNION ALL
(SELECT format('the order %s awaits payment', id) FROM orders WHERE sale_id = $1 AND status = 'confirmed' AND due IS NOT NULL LIMIT 1)
UNION ALL
(SELECT format('the units of the order %s are not released', order_id) FROM releases WHERE sale_id = $1 LIMIT 1)
UNION ALL
SELECT 'its buyers are still in Redis: a worker removes them when nothing of the sale is open, --retire-after after its end'
FROM sale WHERE over AND (retired_at IS NULL OR published_revision < revision)
UNION ALL
SELECT format('its last change was at %s', to_char(changed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
FROM last WHERE changed_at > now() - make_interval(secs => $2)
UNION ALL
SELECT format('the target %s of the relay has not read it: it is at position %s, and the last event of the sale at %s', name, t.position, last.position)
FROM relay_targets AS t, last WHERE t.position < last.position
UNION ALL
SELECT format('%s orders have no events: `stampede audit` names them', n)
FROM (SELECT count(*) AS n FROM orders AS o WHERE o.sale_id = $1 AND NOT EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = $1 AND e.order_id = o.id)) AS lost
WHERE n > 0
