-- Sessions for whose locks others of our role wait, without those that wait for a lock themselves.
--
-- silent is true for a session of our role in the middle of a transaction that waits for its client. Its client may have
-- vanished: Postgres does not ask about a client whose machine is gone without a word, or whose process stands still.
-- (query_start and state_change tell whether it has heard anything since the last look. A COPY they do not tell of.)
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
