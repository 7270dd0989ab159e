-- The versions of the applied migrations, in goose's table. Version 0 marks a table without
-- migrations.
SELECT version_id FROM goose_db_version WHERE is_applied AND version_id > 0
