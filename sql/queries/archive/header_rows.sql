-- Adds the rows of a file's header to those of its draw: its sale $1, and the arrays of its items $2 and of its events $3.
INSERT INTO file_draw (name, row)
SELECT 'sales', $1::jsonb UNION ALL SELECT 'sale_items', jsonb_array_elements($2) UNION ALL SELECT 'sale_events', jsonb_array_elements($3)
