-- Ends the session $1 that began at $2, unless its client was active since it was read: $3 is the
-- start of its query then, and $4 the last change of its state. Returns whether it was ended.
SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) > 0 FROM pg_stat_activity
WHERE pid = $1 AND backend_start = $2 AND query_start = $3 AND state_change = $4 AND usename = session_user
  AND wait_event = 'ClientRead'
