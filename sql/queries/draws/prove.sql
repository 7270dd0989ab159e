-- The part of the entry $2 in the draw of the sale $1: its chunk, and what became of its rank.
SELECT c.chunk, c.records, c.ids, o.order_id, coalesce(o.reason, '') AS reason, o.rank IS NOT NULL AS decided
FROM (SELECT * FROM draw_chunks WHERE sale_id = $1 AND first_id <= $2 ORDER BY first_id DESC LIMIT 1) AS c
LEFT JOIN draw_offers AS o ON o.sale_id = $1 AND o.entry_id = $2
