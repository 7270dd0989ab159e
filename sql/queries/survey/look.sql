-- What each worker shows the same of Postgres: parked dead letters, counted up to 10000, payments that wait for their
-- orders, and the newest recorded audit.
--
-- Returns: parked, waiting and for how many seconds the oldest one waits, and of the audit at (seconds since 1970; since
-- as in fleet/desk.sql, or NULL) and broken.
SELECT (SELECT count(*) FROM (SELECT FROM dead_letters WHERE status = 'parked' LIMIT 10000) AS found) AS parked,
       w.waiting, w.waiting_seconds,
       extract(epoch FROM coalesce(a.at, (SELECT created_at FROM sales WHERE retired_at IS NULL ORDER BY id LIMIT 1)))::double precision AS at,
       coalesce(a.broken, '{}') AS broken
FROM (
    SELECT count(*) AS waiting, coalesce(extract(epoch FROM now() - min(occurred_at)), 0)::double precision AS waiting_seconds
    FROM payment_events AS e
    WHERE type = 'PaymentReceived' AND sale_id IS NULL AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1)
) AS w LEFT JOIN (SELECT at, broken FROM audits ORDER BY id DESC LIMIT 1) AS a ON true
