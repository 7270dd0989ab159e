-- The next rank of each item of the draw of the sale $1 that had a turn, by the letter of the item. It reads one row an item.
WITH RECURSIVE latest AS (
    (SELECT item, rank FROM draw_offers WHERE sale_id = $1 ORDER BY item DESC, rank DESC LIMIT 1)
    UNION ALL
    SELECT had.item, had.rank
    FROM latest
    CROSS JOIN LATERAL (SELECT * FROM draw_offers WHERE sale_id = $1 AND item < latest.item ORDER BY item DESC, rank DESC LIMIT 1) AS had
)
SELECT item, rank + 1 AS next FROM latest
