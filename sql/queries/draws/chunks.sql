-- The records of the list of the draw of the sale $1, from the chunk $2 on: at most $3 chunks, null for all.
SELECT records FROM draw_chunks WHERE sale_id = $1 AND chunk >= $2 ORDER BY chunk LIMIT $3
