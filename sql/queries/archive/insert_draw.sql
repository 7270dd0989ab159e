-- Creates the rows of one table in the draw of a file, for the goods $1.
INSERT INTO {{table}} ({{columns}})
SELECT {{values}} FROM file_draw CROSS JOIN LATERAL jsonb_populate_record(NULL::{{table}}, row || jsonb_build_object('sale_id', $1::uuid)) AS its
WHERE name = '{{table}}'
