-- Those of the entries $3 of the waiting list of the sale $1 who still wait, at most $4 in this order. $2 the entries sale.
SELECT o.id, o.user_id, o.sequence
FROM unnest($3::uuid[]) WITH ORDINALITY AS next (id, n)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $2 AND id = next.id LIMIT 1) AS o -- as in ledger/find_orders.sql
WHERE o.status = 'confirmed' AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
ORDER BY next.n LIMIT $4
