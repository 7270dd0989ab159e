-- S5: every place in a sale, from 1 to the last one that Redis gave out, belongs to exactly one order.
-- Gaps are found between neighbours, so a forged place far away costs nothing.
WITH places AS (
    SELECT sale_id, o.sequence AS place, o.id AS order_id
    FROM orders AS o JOIN audit_sales USING (sale_id) WHERE o.sequence > 0
    UNION
    SELECT sale_id, sequence, order_id FROM audit_buyers
), neighbours AS (
    SELECT sale_id, lag(place, 1, 0::bigint) OVER (PARTITION BY sale_id ORDER BY place) AS before, place
    FROM (
        SELECT sale_id, place FROM places
        UNION
        SELECT sale_id, greatest(places, last_place) + 1 FROM audit_figures
    ) AS known
)
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE place - before WHEN 2 THEN format('place %s of the sale was given out and no order has it', before + 1)
                           ELSE format('places %s to %s of the sale were given out and no order has them', before + 1, place - 1) END AS what
FROM neighbours WHERE place - before > 1
UNION ALL
SELECT sale_id, min(order_id::text)::uuid, NULL,
       format('place %s of the sale belongs to %s orders: %s', place, count(*), left(string_agg(order_id::text, ', ' ORDER BY order_id), 200))
FROM places GROUP BY sale_id, place HAVING count(*) > 1
