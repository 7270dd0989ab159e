-- What each worker shows the same of Postgres: parked dead letters, counted up to 10000, and the newest recorded audit.
--
-- Returns: parked, and of the audit at (seconds since 1970; since as in fleet/desk.sql, or NULL) and broken.
SELECT (SELECT count(*) FROM (SELECT FROM dead_letters WHERE status = 'parked' LIMIT 10000) AS found) AS parked,
       extract(epoch FROM coalesce(a.at, (SELECT created_at FROM sales WHERE retired_at IS NULL ORDER BY id LIMIT 1)))::double precision AS at,
       coalesce(a.broken, '{}') AS broken
FROM (SELECT) AS one LEFT JOIN (SELECT at, broken FROM audits ORDER BY id DESC LIMIT 1) AS a ON true
