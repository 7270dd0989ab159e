-- The record of the nth entry ($3, from 0) of the chunk $2 of the draw of the sale $1.
SELECT substring(records FROM 33 * $3::int + 1 FOR 33) FROM draw_chunks WHERE sale_id = $1 AND chunk = $2
