-- Lifts the limits that the server, the database or the role set for statements: those of a migration may take long.
-- What the client has given in DATABASE_URL stays.
SELECT count(set_config(name, '0', false)) FROM pg_settings
WHERE name IN ('statement_timeout', 'transaction_timeout') AND source <> 'client'
