-- The draw or the waiting list of the goods $1 in the order of the file: rows of four tables, each with the name of its table.
SELECT 'draws' AS name, to_jsonb(t) AS row FROM draws AS t WHERE sale_id = $1
UNION ALL
(SELECT 'draw_chunks', to_jsonb(t) FROM draw_chunks AS t WHERE sale_id = $1 ORDER BY chunk)
UNION ALL
(SELECT 'draw_ranks', to_jsonb(t) FROM draw_ranks AS t WHERE sale_id = $1 ORDER BY chunk)
UNION ALL
(SELECT 'draw_offers', to_jsonb(t) FROM draw_offers AS t WHERE sale_id = $1 ORDER BY item, rank)
