-- A sale, not one of $1, with an order whose time to pay is over (last_overdue); the transaction locks that order. Orders locked
-- by others and the orders $2 are skipped. An order with money that waits for a decision does not expire: it was reported in
-- time, perhaps.
--
-- It goes from one sale with unpaid orders to the next one in the index: many orders in their grace hold up no other sale.
WITH RECURSIVE unpaid AS (
    (SELECT sale_id FROM orders WHERE status = 'confirmed' AND due IS NOT NULL ORDER BY sale_id LIMIT 1)
UNION ALL
    SELECT (SELECT o.sale_id FROM orders AS o WHERE o.status = 'confirmed' AND o.due IS NOT NULL AND o.sale_id > unpaid.sale_id ORDER BY o.sale_id LIMIT 1)
    FROM unpaid WHERE sale_id IS NOT NULL
), overdue AS MATERIALIZED (
    SELECT u.sale_id, last.due
    FROM unpaid AS u LEFT JOIN sales AS s ON s.id = u.sale_id
    CROSS JOIN LATERAL (SELECT last_overdue(seen_at, lost, s.payment_grace_seconds) AS due FROM pulse) AS last
    CROSS JOIN LATERAL (SELECT o.due FROM orders AS o WHERE o.sale_id = u.sale_id AND o.status = 'confirmed' AND o.due <= last.due ORDER BY o.due LIMIT 1) AS first
    WHERE u.sale_id <> ALL ($1::uuid[])
    ORDER BY first.due
)
SELECT locked.sale_id
FROM overdue CROSS JOIN LATERAL (
    SELECT o.sale_id FROM orders AS o
    WHERE o.sale_id = overdue.sale_id AND o.status = 'confirmed' AND o.due <= overdue.due AND o.id <> ALL ($2::uuid[])
      AND NOT EXISTS (SELECT FROM open_payments AS w WHERE w.order_id = o.id AND w.state = 'waiting')
    ORDER BY o.due LIMIT 1 FOR UPDATE SKIP LOCKED
) AS locked
LIMIT 1
