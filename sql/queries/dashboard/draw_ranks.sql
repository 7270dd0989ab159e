-- What became of ranks of the draw of the sale $1. For each of the items $2, by their letters: how many had a turn, at most
-- $3 of those, evenly spaced from 0 on, and the last $4.
SELECT item.n - 1 AS item, had.turns, had.step, o.rank, coalesce(o.place, 0) AS place, o.offered_at, o.entry_id, o.order_id, coalesce(o.reason, '') AS reason,
       coalesce(g.status, '') AS status
FROM unnest($2::text[]) WITH ORDINALITY AS item (letter, n)
CROSS JOIN LATERAL (
    SELECT coalesce(max(rank) + 1, 0) AS turns, greatest((coalesce(max(rank), 0) + $3::bigint) / $3, 1) AS step
    FROM (SELECT rank FROM draw_offers WHERE sale_id = $1 AND draw_offers.item = letter ORDER BY rank DESC LIMIT 1) AS last
) AS had
CROSS JOIN LATERAL (
    SELECT generate_series(0, had.turns - 1, had.step) AS rank
    UNION SELECT generate_series(greatest(had.turns - $4::bigint, 0), had.turns - 1)
) AS series
CROSS JOIN LATERAL (
    SELECT * FROM draw_offers WHERE sale_id = $1 AND draw_offers.item = letter AND draw_offers.rank = series.rank LIMIT 1
) AS o
LEFT JOIN LATERAL (SELECT status FROM orders WHERE sale_id = $1 AND id = o.order_id LIMIT 1) AS g ON true
ORDER BY item.n, o.rank
