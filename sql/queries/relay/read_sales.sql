-- The events of sales after the position $1, up to $2, in the order of their positions, with the terms that the sale had
-- from this revision on: at most $3 of them, and others at the position of the last one.
SELECT e.position, e.sale_id, e.revision, replace(e.type, 'WithItems', '') AS type, e.occurred_at, coalesce(e.operator, '') AS operator,
       coalesce((
           SELECT b.data ->> 'previous_name' FROM sale_events AS b
           WHERE b.sale_id = e.sale_id AND b.revision > e.revision AND b.data ? 'previous_name'
           ORDER BY b.revision LIMIT 1), s.name) AS name,
       {{columns/terms}},
       coalesce((
           SELECT (b.data ->> 'stock')::bigint FROM sale_events AS b
           WHERE b.sale_id = e.sale_id AND b.revision <= e.revision AND b.data ? 'stock' AND b.type <> 'SaleLowering'
           ORDER BY b.revision DESC LIMIT 1), s.stock) AS stock,
       CASE WHEN s.items > 0 THEN (
           SELECT b.data -> 'items' FROM sale_events AS b
           WHERE b.sale_id = e.sale_id AND b.revision <= e.revision AND jsonb_typeof(b.data -> 'items') = 'array' AND b.type <> 'SaleLowering'
           ORDER BY b.revision DESC LIMIT 1) END AS items,
       coalesce((
           SELECT (b.data ->> 'shards')::int FROM sale_events AS b
           WHERE b.sale_id = e.sale_id AND b.revision <= e.revision AND b.data ? 'shards'
           ORDER BY b.revision DESC LIMIT 1), 1) AS shards,
       coalesce((
           SELECT CASE b.type WHEN 'SalePaused' THEN 'paused' WHEN 'SaleEnded' THEN 'ended' ELSE 'open' END FROM sale_events AS b
           WHERE b.sale_id = e.sale_id AND b.revision <= e.revision AND b.type IN ('SaleCreated', 'SaleWithItemsCreated', 'SalePaused', 'SaleResumed', 'SaleEnded')
           ORDER BY b.revision DESC LIMIT 1), s.state) AS state,
       CASE WHEN e.type LIKE 'Draw%' OR e.type LIKE 'Waitlist%' THEN e.data END AS draw
FROM (SELECT * FROM sale_events WHERE position > $1 AND position <= $2 ORDER BY position FETCH FIRST $3 ROWS WITH TIES) AS e
JOIN sales AS s ON s.id = e.sale_id
ORDER BY e.position
