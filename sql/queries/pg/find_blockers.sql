-- Sessions that block others of our role, except those that wait for a lock themselves.
--
-- silent is true for a session of our role that is idle in a transaction. Its client may have
-- vanished: Postgres does not check a client whose machine is gone or whose process is frozen.
-- (query_start and state_change show activity since the last look, but not that of a COPY.)
--
-- Of sessions of another role Postgres shows little more than their pid.
WITH blocker AS MATERIALIZED (
    SELECT DISTINCT unnest(pg_blocking_pids(pid)) AS pid FROM pg_stat_activity
    WHERE datname = current_database() AND usename = session_user AND wait_event_type = 'Lock'
)
SELECT pid, backend_start, query_start, state_change, xact_start, coalesce(usename, '') AS role,
       coalesce(application_name, '') AS application, coalesce(host(client_addr), '') AS client, coalesce(state, '') AS state,
       coalesce(left(query, 100), '') AS query,
       coalesce(usename = session_user AND datname = current_database() AND wait_event = 'ClientRead'
           AND state IN ('active', 'idle in transaction') AND query !~* '^\s*copy', false) AS silent
FROM blocker JOIN pg_stat_activity USING (pid)
WHERE wait_event_type IS DISTINCT FROM 'Lock'
