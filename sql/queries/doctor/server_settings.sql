-- The settings of the server that decide whether and how safely it is written to, and where they come from, and whether
-- each role may create objects in the schema of Stampede (public_create); recovery is true for a standby. Time-outs are
-- those that a session begins with, before pg/prepare_session.sql.
SELECT name, CASE WHEN name LIKE '%_timeout' THEN reset_val ELSE setting END AS setting, source, pg_is_in_recovery() AS recovery
FROM pg_settings
WHERE name IN ('server_version_num', 'fsync', 'synchronous_commit', 'full_page_writes', 'statement_timeout', 'lock_timeout',
    'transaction_timeout', 'idle_session_timeout', 'idle_in_transaction_session_timeout',
    'default_transaction_read_only', 'session_replication_role')
UNION ALL
SELECT 'public_create', CASE WHEN has_schema_privilege('public', current_schema(), 'CREATE') THEN 'on' ELSE 'off' END, '',
    pg_is_in_recovery()
