-- The events of the sale $1 in the order of the file, with the columns of its header (archive/columns.sql).
SELECT * FROM order_events WHERE sale_id = $1 ORDER BY order_id, version
