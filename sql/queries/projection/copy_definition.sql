-- The statements, in order, that give orders_next what LIKE does not copy: indexes, under temporary names, the
-- primary key, comments, options, owner and rights.
WITH indexes AS (
    SELECT i.*, c.relname, c.reltablespace, pg_get_indexdef(i.indexrelid) AS def, obj_description(i.indexrelid, 'pg_class') AS said,
           'orders_next_' || row_number() OVER (ORDER BY i.indexrelid) AS name, con.contype, obj_description(con.oid, 'pg_constraint') AS key_said
    FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid LEFT JOIN pg_constraint AS con ON con.conindid = i.indexrelid AND con.conrelid = i.indrelid
    WHERE i.indrelid = 'orders'::regclass AND i.indisvalid
), orders AS (
    SELECT * FROM pg_class WHERE oid = 'orders'::regclass
), statements AS (
    SELECT 1 AS turn, format('CREATE %sINDEX %I ON orders_next%s', CASE WHEN indisunique THEN 'UNIQUE ' END, name, substr(def, strpos(def, ' USING '))) AS statement FROM indexes
    UNION ALL
    SELECT 2, format('ALTER TABLE orders_next ADD CONSTRAINT %I PRIMARY KEY USING INDEX %I', name, name) FROM indexes WHERE contype = 'p'
    UNION ALL
    SELECT 3, format('COMMENT ON INDEX %I IS %L', name, said) FROM indexes WHERE said IS NOT NULL
    UNION ALL
    SELECT 3, format('COMMENT ON CONSTRAINT %I ON orders_next IS %L', name, key_said) FROM indexes WHERE key_said IS NOT NULL
    UNION ALL
    SELECT 3, format('ALTER TABLE orders_next CLUSTER ON %I', name) FROM indexes WHERE indisclustered
    UNION ALL
    SELECT 3, format('COMMENT ON TABLE orders_next IS %L', obj_description(oid, 'pg_class')) FROM orders WHERE obj_description(oid, 'pg_class') IS NOT NULL
    UNION ALL
    SELECT 3, format('ALTER TABLE orders_next SET (%s)', array_to_string(reloptions, ', ')) FROM orders WHERE reloptions IS NOT NULL
    UNION ALL
    SELECT 4, format('ALTER TABLE orders_next OWNER TO %I', pg_get_userbyid(relowner)) FROM orders WHERE relowner <> current_user::regrole
    UNION ALL
    SELECT 3, format('ALTER TABLE orders_next ALTER COLUMN %I SET STATISTICS %s', attname, attstattarget)
    FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped AND attstattarget >= 0
    UNION ALL
    SELECT DISTINCT 4, format('REVOKE ALL ON orders_next FROM %s', CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END)
    FROM pg_class, aclexplode(relacl) WHERE oid = 'orders_next'::regclass AND grantee <> relowner
    UNION ALL
    SELECT 5, format('GRANT %s ON orders_next TO %s%s', privilege_type, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
                     CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
    FROM orders, aclexplode(relacl) WHERE grantee <> relowner
    UNION ALL
    SELECT 5, format('GRANT %s (%I) ON orders_next TO %s%s', privilege_type, attname, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
                     CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
    FROM pg_attribute, aclexplode(attacl) WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped
)
SELECT statement FROM statements ORDER BY turn, statement
