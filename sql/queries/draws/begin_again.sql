-- Forgets the list of the draw of the sale $1, unless it is frozen.
DELETE FROM draw_chunks USING draws AS d WHERE draw_chunks.sale_id = $1 AND d.sale_id = $1 AND d.frozen_at IS NULL
