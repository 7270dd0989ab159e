-- All targets by name, with the newest position of all events, and the first event that a target lacks.
SELECT t.name, t.url, t.state, t.position, t.fence, coalesce(t.holder, '') AS holder, t.secrets, t.allow_private, t.failures,
       coalesce(t.last_error, '') AS last_error, t.last_error_at, t.retry_at, t.delivered_at, t.created_at,
       newest_position() AS newest, least(o.occurred_at, s.occurred_at, p.occurred_at) AS waiting_since
FROM relay_targets AS t
LEFT JOIN LATERAL (SELECT occurred_at FROM order_events WHERE position > t.position ORDER BY position LIMIT 1) AS o ON true
LEFT JOIN LATERAL (SELECT occurred_at FROM sale_events WHERE position > t.position ORDER BY position LIMIT 1) AS s ON true
LEFT JOIN LATERAL (SELECT occurred_at FROM payment_events WHERE position > t.position ORDER BY position LIMIT 1) AS p ON true
ORDER BY t.name
