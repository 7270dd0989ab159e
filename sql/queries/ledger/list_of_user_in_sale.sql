-- Orders of the user $1 in the sale $6; the rest is that of list_of_user.sql.
SELECT {{columns/order}}, o.sequence, o.epoch, o.n
FROM (
    SELECT *, row_number() OVER (ORDER BY id DESC) AS n
    FROM (
        SELECT * FROM orders
        WHERE sale_id = $6 AND user_id = $1 AND is_live(status) AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
        UNION ALL
        (SELECT * FROM orders
         WHERE sale_id = $6 AND user_id = $1 AND NOT is_live(status) AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
         ORDER BY id DESC
         LIMIT $3)
    ) AS both_kinds
    ORDER BY id DESC
    LIMIT $3
) AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.status = coalesce($5, o.status) OR o.n = $3
ORDER BY o.id DESC
LIMIT $4
