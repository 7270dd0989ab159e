-- Those of the entries $3 of the waiting list of the sale $1 that had no turn, at most $4 in this order. $2 the entries sale.
-- None of them is cancelled before the caller has recorded the turn. LATERAL and LIMIT as in ledger/find_orders.sql.
SELECT o.id, o.user_id, o.sequence, o.status = 'cancelled' AS cancelled
FROM unnest($3::uuid[]) WITH ORDINALITY AS next (id, n)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $2 AND id = next.id LIMIT 1 FOR SHARE) AS o
LEFT JOIN LATERAL (SELECT true AS turn FROM draw_offers WHERE sale_id = $1 AND entry_id = next.id LIMIT 1) AS had ON true
WHERE (is_live(o.status) OR o.status = 'cancelled') AND turn IS NULL
ORDER BY next.n LIMIT $4
