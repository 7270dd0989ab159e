-- The sales, or the one sale $1 if it is not NULL, whose counters are not those of their orders. Sales whose orders are
-- archived are left out. One snapshot: an order and its count are written together. The caller puts counted.sql where
-- the braces are.
SELECT s.id
FROM sales AS s LEFT JOIN (
{{counted}}
) AS c ON c.sale_id = s.id
WHERE ($1::uuid IS NULL OR s.id = $1) AND s.archived_at IS NULL AND ((s.sold, s.last_sequence) IS DISTINCT FROM (coalesce(c.sold, 0), coalesce(c.last_sequence, 0)) OR s.items > 0 AND EXISTS (
    SELECT FROM sale_items AS i WHERE i.sale_id = s.id AND i.sold <> (
        SELECT coalesce(sum(l.units), 0) FROM orders AS o CROSS JOIN LATERAL order_lines(o.lines) AS l
        WHERE o.sale_id = s.id AND ($1::uuid IS NULL OR o.sale_id = $1) AND is_live(o.status) AND l.item = i.item)))
ORDER BY s.id
