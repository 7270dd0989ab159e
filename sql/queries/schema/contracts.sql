-- The contract that a program needs to know before it can use this schema, if there is one.
-- $1 the newest migration that the program has
--
-- Fails with undefined_table in a schema of which nothing was ever removed.
SELECT migration, release FROM schema_contracts WHERE works_from > $1 ORDER BY works_from DESC, migration DESC LIMIT 1
