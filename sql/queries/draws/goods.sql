-- The units of the sale $1 as they are published when the list of its draw is frozen.
SELECT revision, stock, sold, (
    SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('code', code, 'stock', stock, 'sold', nullif(sold, 0))) ORDER BY item < 'a', item)
    FROM sale_items WHERE sale_id = $1) AS items
FROM sales WHERE id = $1
