-- The next rank of each item of the draw of the sale $1 that had a turn, by the letter of the item.
SELECT item, max(rank) + 1 AS next FROM draw_offers WHERE sale_id = $1 GROUP BY item
