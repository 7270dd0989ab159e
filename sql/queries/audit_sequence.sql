-- S5: every place in a sale, from 1 to the last one that Redis gave out, belongs to exactly one order.
WITH places AS (
    SELECT sale_id, o.sequence AS place, o.id AS order_id
    FROM orders AS o JOIN audit_sales USING (sale_id) WHERE o.sequence > 0
    UNION
    SELECT sale_id, sequence, order_id FROM audit_buyers
)
SELECT f.sale_id, NULL::uuid AS order_id, NULL AS user_id, format('place %s of the sale was given out and no order has it', n) AS what
FROM audit_figures AS f CROSS JOIN LATERAL generate_series(1, greatest(f.places, f.last_place)) AS n
WHERE NOT EXISTS (SELECT FROM places AS p WHERE p.sale_id = f.sale_id AND p.place = n)
UNION ALL
SELECT sale_id, min(order_id::text)::uuid, NULL,
       format('place %s of the sale belongs to %s orders: %s', place, count(*), left(string_agg(order_id::text, ', ' ORDER BY order_id), 200))
FROM places GROUP BY sale_id, place HAVING count(*) > 1
