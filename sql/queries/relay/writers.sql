-- The transactions that may still give out or hold positions which are not visible: each INSERT takes this lock before
-- its first position, and Postgres releases it after the transaction has become visible.
-- A transaction that is prepared for a two-phase commit keeps its name, and has no process: pid is 0.
-- A lock on a month alone is not counted: only an INSERT into order_events itself is given a position.
SELECT virtualtransaction AS name, coalesce(pid, 0) AS pid
FROM pg_locks
WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND relation IN ('order_events'::regclass, 'sale_events'::regclass, 'payment_events'::regclass)
