-- Takes the advisory lock $1 if it is free. $2 is how long the session may be idle: Postgres ends a
-- hanging one, so that another can proceed. With NULL the session keeps its settings. Settings that
-- the server lacks are skipped.
SELECT pg_try_advisory_lock($1), count(set_config(name, value, false))
FROM pg_settings JOIN (VALUES
    ('idle_session_timeout', $2::text), ('idle_in_transaction_session_timeout', $2), ('tcp_user_timeout', $2),
    ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '3'),
    -- It counts and copies all orders of a sale, without a limit.
    ('transaction_timeout', '0'), ('statement_timeout', '0')
) AS wanted (name, value) USING (name)
WHERE $2 IS NOT NULL
