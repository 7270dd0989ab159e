-- What each worker shows the same of Postgres: parked dead letters, and payments that wait for their orders, are unclear or
-- disputed, each counted up to 10000, and the newest recorded audit.
--
-- Returns: parked, waiting, unclear and disputed, and for how many seconds the oldest of each does so, and of the audit at
-- (seconds since 1970; since as in fleet/desk.sql, or NULL) and broken.
WITH open AS MATERIALIZED (
    SELECT state, (SELECT count(*) FROM (SELECT FROM open_payments AS o WHERE o.state = states.state ORDER BY position LIMIT 10000) AS found) AS payments,
           coalesce(extract(epoch FROM now() - (SELECT since FROM open_payments AS o WHERE o.state = states.state ORDER BY position LIMIT 1)), 0)::double precision AS seconds
    FROM unnest('{waiting,unclear,disputed}'::text[]) AS states (state)
)
SELECT (SELECT count(*) FROM (SELECT FROM dead_letters WHERE status = 'parked' LIMIT 10000) AS found) AS parked,
       w.payments AS waiting, w.seconds AS waiting_seconds, u.payments AS unclear, u.seconds AS unclear_seconds,
       d.payments AS disputed, d.seconds AS disputed_seconds,
       extract(epoch FROM coalesce(a.at, (SELECT created_at FROM sales WHERE retired_at IS NULL ORDER BY id LIMIT 1)))::double precision AS at,
       coalesce(a.broken, '{}') AS broken
FROM open AS w JOIN open AS u ON u.state = 'unclear' JOIN open AS d ON d.state = 'disputed'
LEFT JOIN (SELECT at, broken FROM audits ORDER BY id DESC LIMIT 1) AS a ON true
WHERE w.state = 'waiting'
