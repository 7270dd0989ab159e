-- The applied migrations, oldest first: their version and time, in goose's table. Version 0 marks a table without
-- migrations.
SELECT version_id, max(tstamp) FROM goose_db_version WHERE is_applied AND version_id > 0 GROUP BY version_id ORDER BY version_id
