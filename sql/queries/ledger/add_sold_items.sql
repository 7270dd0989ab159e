-- Adds the units of the lines $2 to those that live orders hold of the items of the sale $1, $3 times: 1, or -1 to return
-- them. The constraint sale_items_not_oversold refuses what the stock of an item does not hold.
--
-- The rows are locked in the order of the items, and before those of sales: all who need several of them do so.
WITH line AS MATERIALIZED (
    SELECT i.item, l.units FROM order_lines($2) AS l JOIN sale_items AS i ON i.sale_id = $1 AND i.item = l.item
    ORDER BY i.item
    FOR NO KEY UPDATE OF i
)
UPDATE sale_items AS i SET sold = i.sold + $3 * line.units FROM line WHERE i.sale_id = $1 AND i.item = line.item
