-- Orders of the users from $1 on and before $2, by user, and of each user the newest first; of the user $1 only those with ids
-- below $3, unless that is NULL. $7 is the sale, or NULL for all. The rest is that of list_of_user.sql: it looks at $4 orders,
-- and returns at most $5 that have the status $6.
SELECT {{columns/order}}, o.sequence, o.epoch, o.n
FROM (
    SELECT *, row_number() OVER (ORDER BY user_id, id DESC) AS n
    FROM (
        (SELECT * FROM orders
         WHERE is_live(status) AND user_id >= $1 AND user_id < $2 AND (user_id > $1 OR id < coalesce($3, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid))
           AND ($7::uuid IS NULL OR sale_id = $7)
         ORDER BY user_id, id DESC
         LIMIT $4)
        UNION ALL
        (SELECT * FROM orders
         WHERE NOT is_live(status) AND user_id >= $1 AND user_id < $2 AND (user_id > $1 OR id < coalesce($3, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid))
           AND ($7::uuid IS NULL OR sale_id = $7)
         ORDER BY user_id, id DESC
         LIMIT $4)
    ) AS both_kinds
    ORDER BY user_id, id DESC
    LIMIT $4
) AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.status = coalesce($6, o.status) OR o.n = $4
ORDER BY o.user_id, o.id DESC
LIMIT $5
