-- Sets in a new session what the statements of this program rely on, whatever the server, the database or the role
-- prescribe. $1 limits the transactions of a service, in milliseconds; NULL for a command, whose statements may take as
-- long as they need: an audit reads all orders.
--
-- What the client has given at the start of the session, in DATABASE_URL, stays as it is; what the server lacks is
-- skipped. default_transaction_read_only is not here: an administrator who sets it wants no writes.
SELECT count(set_config(name, value, false))
FROM pg_settings JOIN (VALUES
    -- How texts are read and written.
    ('array_nulls', 'on'), ('bytea_output', 'hex'), ('client_encoding', 'UTF8'), ('DateStyle', 'ISO, MDY'),
    ('extra_float_digits', '1'), ('IntervalStyle', 'postgres'), ('quote_all_identifiers', 'off'), ('standard_conforming_strings', 'on'),
    ('TimeZone', 'UTC'), ('transform_null_equals', 'off'),
    -- A statement that waited for a row must see what was committed meanwhile.
    ('default_transaction_isolation', 'read committed'),
    -- Statements are short: to compile one takes longer than to run it.
    ('jit', 'off'),
    -- The pool keeps sessions, and rebuilds hold locks in idle ones.
    ('idle_session_timeout', '0'),
    -- A session whose client has vanished may hold the lock on the row of a hot sale, which blocks all others. A server
    -- notices that within ten seconds: by keepalives while it waits for the client, by tcp_user_timeout while an answer is
    -- not acknowledged, and between two statements of a transaction by the first of these. That one does not apply within a
    -- batch: fulfillment/sweeps.go ends such a session.
    ('idle_in_transaction_session_timeout', '10000'), ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '1'),
    ('tcp_keepalives_count', '5'), ('tcp_user_timeout', '10000'),
    ('transaction_timeout', coalesce($1::text, '0')), -- since PostgreSQL 17
    ('statement_timeout', CASE WHEN $1 IS NULL THEN '0' END), ('lock_timeout', CASE WHEN $1 IS NULL THEN '0' END)
) AS wanted (name, value) USING (name)
WHERE source <> 'client' AND value IS NOT NULL
