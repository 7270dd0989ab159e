-- What each worker shows the same of Postgres: parked dead letters, counted up to 10000, and the newest recorded audit.
--
-- Returns: parked, and of the audit at (seconds since 1970, 0 for none), broken, and moving.
SELECT (SELECT count(*) FROM (SELECT FROM dead_letters WHERE status = 'parked' LIMIT 10000) AS found) AS parked,
       coalesce(extract(epoch FROM a.at), 0)::double precision AS at, coalesce(a.broken, '{}') AS broken, coalesce(a.moving, false) AS moving
FROM (SELECT) AS one LEFT JOIN (SELECT at, broken, moving FROM audits ORDER BY id DESC LIMIT 1) AS a ON true
