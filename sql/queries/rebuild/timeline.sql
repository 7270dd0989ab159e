-- The timeline of the server: another one since the database was restored to a point in time, or a standby was promoted.
SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint
