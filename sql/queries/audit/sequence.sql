-- S5: every place of a shard, from its first to the last that Redis assigned, belongs to exactly one order. The only
-- shard of a sale has all places from 1, and shard s of n those from s + 1 in steps of n. Gaps are found between
-- neighbors, so a forged place far away costs nothing.
--
-- Places assigned after Redis was read are left out, because their orders may be in transit. Places
-- that are still not assigned are reported. A shard that cannot be read assigns none.
--
-- Up to the sequence of the last rebuild, places may lack orders, which were lost with Redis, and a
-- Redis that was set back may have assigned places twice. A voided order has no place.
WITH known AS (
    SELECT a.sale_id, a.shard, o.sequence AS place, o.id AS order_id
    FROM orders AS o JOIN audit_sales AS s USING (sale_id)
    JOIN audit_shard_figures AS a ON a.sale_id = o.sale_id AND a.shard = (o.sequence % s.shards + s.shards - 1) % s.shards
    WHERE o.sequence > a.rebuilt_to AND (o.sequence < a.read_place OR o.sequence >= a.next_place OR a.places IS NULL) AND o.status <> 'voided'
    UNION
    SELECT b.sale_id, (b.sequence % s.shards + s.shards - 1) % s.shards, b.sequence, b.order_id
    FROM audit_buyers AS b JOIN audit_sales AS s USING (sale_id) JOIN audit_shard_figures AS a USING (sale_id, shard)
    WHERE b.sequence > a.rebuilt_to AND NOT b.beyond
), neighbours AS (
    SELECT a.label, a.sale_id, a.shards AS step, lag(place, 1, (first_sequence + 1 - shards)::numeric) OVER (PARTITION BY sale_id, shard ORDER BY place) AS before, place
    FROM (
        SELECT sale_id, shard, place::numeric FROM known
        UNION
        SELECT sale_id, shard, greatest(read_place, first_sequence + 1, CASE WHEN last_place >= next_place THEN last_place::numeric + shards END) FROM audit_shard_figures
    ) AS every JOIN audit_shard_figures AS a USING (sale_id, shard)
)
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       label || CASE place - before WHEN 2 * step THEN format('place %s of the sale was given out and no order has it', before + step)
                ELSE format('places %s to %s of the sale were given out and no order has them', before + step, place - step) END AS what,
       'operator' AS remedy
FROM neighbours WHERE place - before > step
UNION ALL
SELECT sale_id, min(order_id::text)::uuid, NULL,
       format('place %s of the sale belongs to %s orders: %s', place, count(*), left(string_agg(order_id::text, ', ' ORDER BY order_id), 200)),
       'operator'
FROM known GROUP BY sale_id, place HAVING count(*) > 1
