-- The settings of the server that decide what a crash loses; recovery is true for a standby.
SELECT name, setting, pg_is_in_recovery() AS recovery
FROM pg_settings
WHERE name IN ('server_version_num', 'fsync', 'synchronous_commit', 'full_page_writes', 'statement_timeout')
