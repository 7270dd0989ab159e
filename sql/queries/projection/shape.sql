-- The definition of the table orders in words, without its rows: a table that replaces it must have the same.
SELECT format('column %s: %s %s%s%s%s%s collation %s storage %s statistics %s rights %s: %s', row_number() OVER (ORDER BY a.attnum), a.attname,
              format_type(a.atttypid, a.atttypmod), CASE WHEN a.attnotnull THEN ' not null' END, ' default ' || pg_get_expr(d.adbin, d.adrelid),
              ' identity ' || nullif(a.attidentity::text, ''), ' generated ' || nullif(a.attgenerated::text, ''), a.attcollation, a.attstorage, a.attstattarget,
              (SELECT array_agg(r::text ORDER BY r::text) FROM unnest(a.attacl) AS r), col_description(a.attrelid, a.attnum)) AS said
FROM pg_attribute AS a LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = 'orders'::regclass AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT format('constraint %s: %s: %s', conname, pg_get_constraintdef(oid), obj_description(oid, 'pg_constraint')) FROM pg_constraint WHERE conrelid = 'orders'::regclass
UNION ALL
SELECT format('index %s%s%s%s: %s', pg_get_indexdef(indexrelid), CASE WHEN indisprimary THEN ' primary' END, CASE WHEN indisclustered THEN ' clustered' END,
              CASE WHEN indisreplident THEN ' replica identity' END, obj_description(indexrelid, 'pg_class'))
FROM pg_index WHERE indrelid = 'orders'::regclass AND indisvalid
UNION ALL
SELECT format('table owned by %s, options %s, replica identity %s, row security %s, persistence %s, tablespace %s, rights %s: %s', pg_get_userbyid(relowner), reloptions,
              relreplident, relrowsecurity, relpersistence, reltablespace, (SELECT array_agg(r::text ORDER BY r::text) FROM unnest(coalesce(relacl, acldefault('r', relowner))) AS r), obj_description(oid, 'pg_class'))
FROM pg_class WHERE oid = 'orders'::regclass
ORDER BY said
