-- +goose Up
-- Functions that run with the rights of their owner look up names in their own schema, and last in pg_temp, where each
-- caller can make objects. Only roles may call them that have the right whose use needs the function.

-- +goose StatementBegin
DO $$
DECLARE
    needed record;
    role text;
BEGIN
    FOR needed IN
        SELECT f.oid::regprocedure AS function, f.pronamespace::regnamespace AS schema, n.for_right, n.on_tables, n.all_of
        FROM (VALUES ('make_month(uuid)'::regprocedure, 'INSERT', '{sales,orders}'::regclass[], 'pg_write_all_data'),
                     ('next_position()', 'INSERT', '{sale_events}', 'pg_write_all_data'),
                     ('newest_position()', 'SELECT', '{relay_targets}', 'pg_read_all_data')) AS n (function, for_right, on_tables, all_of)
        JOIN pg_proc AS f ON f.oid = n.function
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = %s, pg_temp', needed.function, needed.schema);
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', needed.function);
        FOR role IN
            SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END
            FROM (
                SELECT acl.* FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner))) AS acl WHERE oid = ANY (needed.on_tables)
                UNION ALL
                SELECT acl.* FROM pg_attribute, aclexplode(attacl) AS acl WHERE attrelid = ANY (needed.on_tables)
            ) AS rights
            WHERE privilege_type = needed.for_right
            UNION
            SELECT needed.all_of
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', needed.function, role);
        END LOOP;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
ALTER FUNCTION make_month(uuid) SET search_path FROM CURRENT;
ALTER FUNCTION next_position() SET search_path FROM CURRENT;
ALTER FUNCTION newest_position() SET search_path FROM CURRENT;
GRANT EXECUTE ON FUNCTION make_month(uuid), next_position(), newest_position() TO PUBLIC;
