-- Settings of the rebuilding session. New tables are created in the schema of orders, whatever else the path has. Run
-- unchanged by the simple protocol.
SELECT set_config('search_path', (
    SELECT format('%I', nspname) FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace WHERE pg_class.oid = 'orders'::regclass
), false);
SET statement_timeout = 0;
