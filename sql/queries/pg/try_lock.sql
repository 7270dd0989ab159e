-- Takes the advisory lock $1, which one session has at a time, unless it is held. $2 is for how long the session may be
-- silent: one that hangs, or whose machine is gone, is ended, so that another can go on. With NULL the session keeps
-- its settings. A server that does not know a setting goes without it.
SELECT pg_try_advisory_lock($1), count(set_config(name, value, false))
FROM pg_settings JOIN (VALUES
    ('idle_session_timeout', $2::text), ('idle_in_transaction_session_timeout', $2), ('tcp_user_timeout', $2),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '3'),
    -- It counts and copies the orders of a sale, however many those are.
    ('transaction_timeout', '0')
) AS wanted (name, value) USING (name)
WHERE $2 IS NOT NULL
