-- The roots of all chunks of the draw of the sale $1, in their order.
SELECT hash FROM draw_chunks WHERE sale_id = $1 ORDER BY chunk
