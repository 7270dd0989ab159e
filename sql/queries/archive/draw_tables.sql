-- The columns of the rows of each table in the draw of a file, by the name of the table. None if Postgres has the draw of the
-- goods $1.
SELECT DISTINCT ON (name) name, ARRAY(SELECT jsonb_object_keys(row)) AS columns
FROM file_draw WHERE NOT EXISTS (SELECT FROM draws WHERE sale_id = $1) ORDER BY name
