-- Recounts the units sold of the items of the sale $1. The caller has locked them (catalog/lock_items.sql) and then the sale.
UPDATE sale_items AS i SET sold = coalesce(c.sold, 0)
FROM sale_items AS own LEFT JOIN (
    SELECT l.item, sum(l.units)::bigint AS sold
    FROM orders AS o CROSS JOIN LATERAL order_lines(o.lines) AS l WHERE o.sale_id = $1 AND is_live(o.status) GROUP BY l.item
) AS c USING (item)
WHERE own.sale_id = $1 AND i.sale_id = $1 AND i.item = own.item AND i.sold <> coalesce(c.sold, 0)
