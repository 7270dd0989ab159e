-- The pair of which the sale $1 is the goods or the entries; no row if it is in none. over is true if none of its units
-- will be offered any more.
SELECT d.sale_id AS goods, d.entries_id AS entries, d.kind,
       d.kind = 'draw' AND NOT g.offers_only OR d.voided_at IS NOT NULL OR g.state = 'ended' OR (g.closes_at <= now()) IS TRUE AS over
FROM draws AS d JOIN sales AS g ON g.id = d.sale_id
WHERE d.sale_id = $1 OR d.entries_id = $1
