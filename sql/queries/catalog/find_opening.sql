-- Whether the draw of the sale $1 is void, and whether its rest will be, or is, for everybody; no row if it is not drawn.
SELECT voided_at IS NOT NULL AS void, EXISTS (SELECT FROM sale_events AS e WHERE e.sale_id = $1 AND e.type = 'DrawOpening') AS opening
FROM draws WHERE sale_id = $1 AND kind = 'draw'
