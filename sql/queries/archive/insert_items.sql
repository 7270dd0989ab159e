-- Creates the items $1 of the sale of a file.
INSERT INTO sale_items ({{columns}})
SELECT {{values}} FROM jsonb_populate_recordset(NULL::sale_items, $1)
