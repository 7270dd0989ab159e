-- Chunks of the list of the draw of the sale $1, at most $3, after the chunk $2.
SELECT chunk, first_id, records, ids, hash FROM draw_chunks WHERE sale_id = $1 AND chunk > $2 ORDER BY chunk LIMIT $3
