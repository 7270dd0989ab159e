-- Offers of the item $3 in the draw of the sale $1 whose orders were lost with Redis, at most $5 by rank, with the entries
-- ($2 the entries sale). An order of an earlier epoch than $4, that of the sale, is void if it is not in Postgres by now.
SELECT lost.rank, lost.place, lost.entry_id, o.user_id, o.status = 'cancelled' AS cancelled
FROM draw_offers AS lost
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $2 AND id = lost.entry_id LIMIT 1) AS o -- as in ledger/find_orders.sql
LEFT JOIN LATERAL (SELECT status FROM orders WHERE sale_id = $1 AND id = lost.order_id LIMIT 1) AS made ON true
WHERE lost.sale_id = $1 AND lost.item = $3 AND lost.order_id IS NOT NULL AND lost.epoch < $4 AND coalesce(made.status, 'voided') = 'voided'
ORDER BY lost.rank LIMIT $5
