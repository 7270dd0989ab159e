-- What became of the ranks of the draw of the sale $1: the rows with a rank from $3 on of the item $2, at most $4.
SELECT rank, place, coalesce(reason, '') AS reason
FROM draw_offers WHERE sale_id = $1 AND item = $2 AND rank >= $3 ORDER BY rank LIMIT $4
