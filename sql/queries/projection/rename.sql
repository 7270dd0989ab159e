-- The statements, in order, that replace orders, renamed to orders_replaced, with orders_next. The indexes of
-- copy_definition.sql get the names of the old table's indexes.
WITH indexes AS (
    SELECT c.relname, row_number() OVER (ORDER BY i.indexrelid) AS n
    FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    WHERE i.indrelid = 'orders'::regclass AND i.indisvalid
)
SELECT statement
FROM (
    VALUES (0, 'ALTER TABLE orders RENAME TO orders_replaced'), (1, 'ALTER TABLE orders_next RENAME TO orders')
    UNION ALL
    SELECT 2, format('ALTER INDEX %I RENAME TO %I', relname, 'orders_replaced_' || n) FROM indexes
    UNION ALL
    SELECT 3, format('ALTER INDEX %I RENAME TO %I', 'orders_next_' || n, relname) FROM indexes
) AS statements (turn, statement)
ORDER BY turn, statement
