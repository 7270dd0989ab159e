-- The places by rank of the draw of the sale $1: its chunks $2 to $3.
SELECT chunk, places FROM draw_ranks WHERE sale_id = $1 AND chunk BETWEEN $2 AND $3 ORDER BY chunk
