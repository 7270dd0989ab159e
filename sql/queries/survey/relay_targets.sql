-- The active targets of the relay, and for how many seconds an event has waited while nobody served the target: since the
-- event, the last delivery, or the time until which the relay waits after a failure; 0 if the target lacks none.
SELECT t.name, coalesce(extract(epoch FROM now() - CASE WHEN lacks.since IS NOT NULL THEN greatest(lacks.since, t.delivered_at, t.retry_at) END), 0)::double precision AS seconds
FROM relay_targets AS t
LEFT JOIN LATERAL (SELECT occurred_at FROM order_events WHERE position > t.position ORDER BY position LIMIT 1) AS o ON true
LEFT JOIN LATERAL (SELECT occurred_at FROM sale_events WHERE position > t.position ORDER BY position LIMIT 1) AS s ON true
LEFT JOIN LATERAL (SELECT occurred_at FROM payment_events WHERE position > t.position ORDER BY position LIMIT 1) AS p ON true
CROSS JOIN LATERAL (SELECT least(o.occurred_at, s.occurred_at, p.occurred_at) AS since) AS lacks
WHERE t.state = 'active'
