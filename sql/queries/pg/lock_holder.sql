-- The session that holds the advisory lock $1 alone, with the columns of find_blockers.sql.
SELECT pid, backend_start, query_start, state_change, xact_start, coalesce(usename, '') AS role,
       coalesce(application_name, '') AS application, coalesce(host(client_addr), '') AS client, coalesce(state, '') AS state,
       coalesce(left(query, 100), '') AS query, false AS silent
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock' AND objsubid = 1
  AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND classid::bigint = $1::bigint >> 32 AND objid::bigint = $1::bigint & 4294967295
