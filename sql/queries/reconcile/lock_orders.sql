-- Locks the orders $2 of the sale $1 until the end of the transaction.
SELECT o.id
FROM unnest($2::uuid[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT id FROM orders WHERE sale_id = $1 AND id = wanted.id LIMIT 1) AS o -- as in find_orders.sql
ORDER BY o.id
FOR UPDATE OF o
