-- The settings of the server that decide whether and how safely it is written to, and where they come from; recovery
-- is true for a standby.
SELECT name, setting, source, pg_is_in_recovery() AS recovery
FROM pg_settings
WHERE name IN ('server_version_num', 'fsync', 'synchronous_commit', 'full_page_writes', 'statement_timeout', 'lock_timeout',
    'default_transaction_read_only', 'session_replication_role')
