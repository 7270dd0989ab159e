-- S5: every place in a sale, from 1 to the last that Redis assigned, belongs to exactly one order.
-- Gaps are found between neighbors, so a forged place far away costs nothing.
--
-- Places assigned after Redis was read are left out, because their orders may be in transit. Places
-- that are still not assigned are reported.
--
-- Up to the sequence of the last rebuild, places may lack orders, which were lost with Redis, and a
-- Redis that was set back may have assigned places twice. A voided order has no place.
WITH places AS (
    SELECT sale_id, o.sequence AS place, o.id AS order_id
    FROM orders AS o JOIN audit_figures AS f USING (sale_id) WHERE o.sequence > f.rebuilt_to AND (o.sequence <= f.places OR o.sequence > f.latest) AND o.status <> 'voided'
    UNION
    SELECT sale_id, b.sequence, b.order_id FROM audit_buyers AS b JOIN audit_figures AS f USING (sale_id) WHERE b.sequence > f.rebuilt_to AND NOT b.beyond
), neighbours AS (
    SELECT sale_id, lag(place, 1, rebuilt_to) OVER (PARTITION BY sale_id ORDER BY place) AS before, place
    FROM (
        SELECT sale_id, place FROM places
        UNION
        SELECT sale_id, greatest(places, rebuilt_to, CASE WHEN last_place > latest THEN last_place END)::numeric + 1 FROM audit_figures
    ) AS known JOIN audit_figures USING (sale_id)
)
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE place - before WHEN 2 THEN format('place %s of the sale was given out and no order has it', before + 1)
                           ELSE format('places %s to %s of the sale were given out and no order has them', before + 1, place - 1) END AS what,
       'operator' AS remedy
FROM neighbours WHERE place - before > 1
UNION ALL
SELECT sale_id, min(order_id::text)::uuid, NULL,
       format('place %s of the sale belongs to %s orders: %s', place, count(*), left(string_agg(order_id::text, ', ' ORDER BY order_id), 200)),
       'operator'
FROM places GROUP BY sale_id, place HAVING count(*) > 1
