-- How the server of Postgres is. Of the sessions of other roles it may tell little more than that they exist.
--
-- Returns: connections of clients by state (other: not told, too), their limit, the age of the oldest open transaction
-- that is told, locks that are waited for, and the deadlocks of this database since its statistics began.
SELECT count(*) FILTER (WHERE state = 'active') AS active, count(*) FILTER (WHERE state = 'idle') AS idle,
       count(*) FILTER (WHERE state LIKE 'idle in transaction%') AS in_transaction, count(*) AS connections,
       current_setting('max_connections')::bigint AS connections_max,
       coalesce(extract(epoch FROM now() - min(xact_start)), 0)::double precision AS oldest_seconds,
       (SELECT count(*) FROM pg_locks WHERE NOT granted) AS locks_waiting,
       (SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()) AS deadlocks
FROM pg_stat_activity
WHERE backend_type = 'client backend' OR backend_type IS NULL AND datid IS NOT NULL AND usesysid IS NOT NULL
