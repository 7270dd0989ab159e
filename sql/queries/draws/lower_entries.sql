-- Asks for a stock of the sale $1 that leaves nothing; it is lowered as by an operator (catalog/restock.go), and withdrawn
-- by a rebuild before that. This is a second guard: the sale has ended, and no order of it is held. A stock is at least 1.
WITH sale AS (
    UPDATE sales SET revision = revision + 1 WHERE id = $1 AND stock > greatest(sold, 1) AND (items = 0 OR sold > 0)
    RETURNING id, revision, stock, greatest(sold, 1) AS least
)
INSERT INTO sale_events (sale_id, revision, type, data)
SELECT id, revision, 'SaleLowering', jsonb_strip_nulls(jsonb_build_object('stock', least, 'units', least - stock, 'item_units', (
    SELECT jsonb_object_agg(code, i.sold - i.stock) FROM sale_items AS i WHERE i.sale_id = sale.id AND i.stock > i.sold)))
FROM sale
