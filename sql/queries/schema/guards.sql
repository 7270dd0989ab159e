-- The constraints, the indexes and the NOT NULL columns of the tables $1: table, kind, name,
-- definition, and why one is not enforced. A missing table has a row without a kind.
--
-- Definitions are in Postgres' words, without the schema. The index of a constraint comes with the
-- constraint. A partitioned table and its months have the same guards, because Postgres refuses to
-- drop one from a month alone; but an index can become invalid in a month.
--
-- Kind month: the months of a partitioned table, and with the trouble MISSING those that it lacks:
-- of sales, of today, and the next one, unless they have a DEFAULT partition (doctor/default_partitions.sql).
-- Their definition is the lowest id of a sale in them.
WITH tables AS (
    SELECT wanted.name, c.oid, n.nspname, c.relkind
    FROM unnest($1::text[]) AS wanted (name)
    LEFT JOIN pg_class AS c ON c.oid = to_regclass(wanted.name) LEFT JOIN pg_namespace AS n ON n.oid = c.relnamespace
), indexes AS (
    SELECT i.indexrelid, i.indrelid, i.indisunique,
           CASE WHEN NOT (i.indisvalid AND i.indisready) THEN 'INVALID' ELSE coalesce((
               SELECT 'INVALID in ' || min(h.inhrelid::regclass::text)
               FROM pg_inherits AS h JOIN pg_index AS p ON p.indexrelid = h.inhrelid
               WHERE h.inhparent = i.indexrelid AND NOT (p.indisvalid AND p.indisready)), '') END AS trouble
    FROM pg_index AS i
), parts AS (
    SELECT 'orders' AS name, orders AS part, first, until FROM order_months UNION ALL SELECT 'order_events', events, first, until FROM order_months
), needed AS (
    SELECT first_sale(sale_month(id)) AS first FROM sales WHERE archived_at IS NULL
    UNION
    SELECT first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + n * interval '1 month') FROM generate_series(0, 1) AS n
)
SELECT "table", kind, name, definition, trouble FROM (
SELECT name AS "table", '' AS kind, ''::text AS name, '' AS definition, '' AS trouble FROM tables WHERE oid IS NULL
UNION ALL
SELECT t.name, 'constraint', c.conname::text, replace(replace(pg_get_constraintdef(c.oid), ' NOT VALID', ''), ' REFERENCES ' || quote_ident(t.nspname) || '.', ' REFERENCES '),
       CASE WHEN NOT c.convalidated THEN 'NOT VALID' WHEN c.contype IN ('p', 'u') THEN i.trouble ELSE '' END
FROM tables AS t JOIN pg_constraint AS c ON c.conrelid = t.oid LEFT JOIN indexes AS i ON i.indexrelid = c.conindid
WHERE c.contype IN ('p', 'u', 'c', 'f', 'x')
UNION ALL
SELECT t.name, CASE WHEN i.indisunique THEN 'unique index' ELSE 'index' END, c.relname::text,
       regexp_replace(pg_get_indexdef(i.indexrelid), ' ON (ONLY )?' || quote_ident(t.nspname) || '\.', ' ON \1'), i.trouble
FROM tables AS t JOIN indexes AS i ON i.indrelid = t.oid JOIN pg_class AS c ON c.oid = i.indexrelid
WHERE NOT EXISTS (SELECT FROM pg_constraint AS p WHERE p.conindid = i.indexrelid AND p.conrelid = t.oid AND p.contype IN ('p', 'u', 'x'))
UNION ALL
SELECT t.name, 'column', a.attname::text, 'NOT NULL',
       CASE WHEN EXISTS (SELECT FROM pg_constraint AS c WHERE c.conrelid = t.oid AND c.contype = 'n' AND c.conkey = ARRAY[a.attnum] AND NOT c.convalidated) THEN 'NOT VALID' ELSE '' END
FROM tables AS t JOIN pg_attribute AS a ON a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE a.attnotnull
UNION ALL
SELECT name, 'month', part::text, first::text, '' FROM parts WHERE part IS NOT NULL
UNION ALL
SELECT t.name, 'month', to_char(sale_month(n.first), 'YYYY-MM'), n.first::text, 'MISSING'
FROM tables AS t, needed AS n
WHERE t.relkind = 'p' AND NOT EXISTS (SELECT FROM pg_partitioned_table AS d WHERE d.partrelid = t.oid AND d.partdefid <> 0)
  AND NOT EXISTS (SELECT FROM parts AS p WHERE p.name = t.name AND p.part IS NOT NULL AND n.first >= p.first AND n.first < p.until)
) AS guards
ORDER BY "table" COLLATE "C", kind COLLATE "C", name COLLATE "C"
