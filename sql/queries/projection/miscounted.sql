-- The sales, or the one sale $1 if it is not NULL, whose counters are not those of their orders, with the
-- highest place that a confirmed order has had. Sales whose orders are archived are left out. One snapshot: an order and its count are written together.
SELECT s.id, coalesce(o.last_sequence, 0)
FROM sales AS s LEFT JOIN (
    SELECT sale_id, sum(quantity) FILTER (WHERE status IN ('confirmed', 'paid')) AS units,
           max(sequence) FILTER (WHERE status NOT IN ('rejected', 'voided')) AS last_sequence
    FROM orders WHERE $1::uuid IS NULL OR sale_id = $1
    GROUP BY sale_id
) AS o ON o.sale_id = s.id
WHERE ($1::uuid IS NULL OR s.id = $1) AND s.archived_at IS NULL AND (s.sold <> coalesce(o.units, 0) OR s.last_sequence < coalesce(o.last_sequence, 0))
ORDER BY s.id
