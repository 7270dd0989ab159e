-- The stock of the sale $1 and its changes since the list of its draw was frozen, as of one revision. No row before that.
SELECT s.revision, s.stock, (
    SELECT jsonb_agg(jsonb_build_object('code', code, 'stock', stock) ORDER BY item < 'a', item) FROM sale_items WHERE sale_id = $1) AS items, (
    SELECT jsonb_agg(jsonb_build_object('revision', e.revision, 'at', e.occurred_at, 'stock', e.data -> 'stock', 'items', (
        SELECT jsonb_agg(jsonb_build_object('code', item -> 'code', 'stock', item -> 'stock') ORDER BY n)
        FROM jsonb_array_elements(e.data -> 'items') WITH ORDINALITY AS of (item, n))) ORDER BY e.revision)
    FROM sale_events AS e WHERE e.sale_id = $1 AND e.type = 'SaleRestocked' AND e.revision > f.revision) AS restocks
FROM sales AS s JOIN (SELECT revision FROM sale_events WHERE sale_id = $1 AND type = 'DrawFrozen' ORDER BY revision LIMIT 1) AS f ON true
WHERE s.id = $1
