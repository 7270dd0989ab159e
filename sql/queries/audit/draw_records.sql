-- The list of the draw of the sale $1: the records of the entries.
SELECT records FROM draw_chunks WHERE sale_id = $1 ORDER BY chunk
