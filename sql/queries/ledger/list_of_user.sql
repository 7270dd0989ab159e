-- Orders of the user $1, newest first, with ids below $2 unless that is NULL. It looks at $3 of them, and returns at most $4 that
-- have the status $5, or any if that is NULL. The last one that it looked at is returned too, whatever its status: the next
-- page begins after it. The user's live orders, at most one per sale, and ended orders have separate indexes.
--
-- Returns the orders, and the number of each among those that were looked at, from 1.
SELECT {{columns/order}}, o.sequence, o.epoch, o.n
FROM (
    SELECT *, row_number() OVER (ORDER BY id DESC) AS n
    FROM (
        SELECT * FROM orders
        WHERE user_id = $1 AND is_live(status) AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
        UNION ALL
        (SELECT * FROM orders
         WHERE user_id = $1 AND NOT is_live(status) AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
         ORDER BY id DESC
         LIMIT $3)
    ) AS both_kinds
    ORDER BY id DESC
    LIMIT $3
) AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.status = coalesce($5, o.status) OR o.n = $3
ORDER BY o.id DESC
LIMIT $4
