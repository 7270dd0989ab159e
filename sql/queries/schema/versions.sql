-- The versions of the migrations that are applied, as goose notes them. Version 0 marks a table without migrations.
SELECT version_id FROM goose_db_version WHERE is_applied AND version_id > 0
