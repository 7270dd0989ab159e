-- The entries with the next ranks of an item in the draw of the sale $1: at most $5 ranks from $4 on. The ranks of the
-- item begin at $3 in the places of all items. $2 the entries sale.
SELECT next.rank, place, entry_id, o.user_id, o.status = 'cancelled' AS cancelled
FROM generate_series($4::bigint, $4::bigint + $5::bigint - 1) AS next (rank)
CROSS JOIN LATERAL (
    SELECT ('x' || encode(substring(places FROM (4 * (($3::bigint + next.rank) % 1024) + 1)::int FOR 4), 'hex'))::bit(32)::bigint AS place
    FROM draw_ranks WHERE sale_id = $1 AND chunk = ($3::bigint + next.rank) / 1024
) AS ranked
CROSS JOIN LATERAL (
    SELECT encode(substring(ids FROM (16 * (place % 1024) + 1)::int FOR 16), 'hex')::uuid AS entry_id
    FROM draw_chunks WHERE sale_id = $1 AND chunk = place / 1024
) AS entry
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $2 AND id = entry_id LIMIT 1) AS o -- as in ledger/find_orders.sql
ORDER BY next.rank
