-- The constraints, the indexes and the NOT NULL columns of the tables $1: table, kind, name,
-- definition, and why one is not enforced. A missing table has a row without a kind.
--
-- Definitions are in Postgres' words, without the schema. The index of a constraint comes with the
-- constraint.
WITH tables AS (
    SELECT wanted.name, c.oid, n.nspname
    FROM unnest($1::text[]) AS wanted (name)
    LEFT JOIN pg_class AS c ON c.oid = to_regclass(wanted.name) LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
)
SELECT "table", kind, name, definition, trouble FROM (
SELECT name AS "table", '' AS kind, ''::text AS name, '' AS definition, '' AS trouble FROM tables WHERE oid IS NULL
UNION ALL
SELECT t.name, 'constraint', c.conname::text, replace(replace(pg_get_constraintdef(c.oid), ' NOT VALID', ''), ' REFERENCES ' || quote_ident(t.nspname) || '.', ' REFERENCES '),
       CASE WHEN NOT c.convalidated THEN 'NOT VALID' WHEN NOT coalesce(i.indisvalid AND i.indisready, true) AND c.contype IN ('p', 'u') THEN 'INVALID' ELSE '' END
FROM tables AS t JOIN pg_constraint AS c ON c.conrelid = t.oid LEFT JOIN pg_index AS i ON i.indexrelid = c.conindid
WHERE c.contype IN ('p', 'u', 'c', 'f', 'x')
UNION ALL
SELECT t.name, CASE WHEN i.indisunique THEN 'unique index' ELSE 'index' END, c.relname::text,
       replace(pg_get_indexdef(i.indexrelid), ' ON ' || quote_ident(t.nspname) || '.', ' ON '),
       CASE WHEN i.indisvalid AND i.indisready THEN '' ELSE 'INVALID' END
FROM tables AS t JOIN pg_index AS i ON i.indrelid = t.oid JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE NOT EXISTS (SELECT FROM pg_constraint AS p WHERE p.conindid = i.indexrelid AND p.conrelid = t.oid AND p.contype IN ('p', 'u', 'x'))
UNION ALL
SELECT t.name, 'column', a.attname::text, 'NOT NULL',
       CASE WHEN EXISTS (SELECT FROM pg_constraint AS c WHERE c.conrelid = t.oid AND c.contype = 'n' AND c.conkey = ARRAY[a.attnum] AND NOT c.convalidated) THEN 'NOT VALID' ELSE '' END
FROM tables AS t JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE a.attnotnull
) AS guards
ORDER BY "table" COLLATE "C", kind COLLATE "C", name COLLATE "C"
