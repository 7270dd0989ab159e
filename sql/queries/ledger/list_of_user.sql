-- Orders of the user $1, newest first, with ids below $2 unless that is NULL. It looks at $3 of them, and returns at most $4 that
-- have the status $5, or any if that is NULL. The last one that it looked at is returned too, whatever its status: the next
-- page begins after it. The user's live orders, at most one per sale, and ended orders have separate indexes.
--
-- Returns the orders, and the number of each among those that were looked at, from 1.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN o.pay_from IS NOT NULL THEN o.due + coalesce(p.lost, lost_time()) - make_interval(secs => sale.payment_window_seconds) END AS pay_from,
       CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = o.sale_id) AS entry_for, sale.offers_only IS TRUE AS offers_only, coalesce(o.key_fingerprint, '') AS key_fingerprint, o.sequence, o.epoch, o.n
FROM (
    SELECT *, row_number() OVER (ORDER BY id DESC) AS n
    FROM (
        SELECT * FROM orders
        WHERE user_id = $1 AND status IN ('confirmed', 'paid') AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
        UNION ALL
        (SELECT * FROM orders
         WHERE user_id = $1 AND status NOT IN ('confirmed', 'paid') AND id < coalesce($2, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
         ORDER BY id DESC
         LIMIT $3)
    ) AS both_kinds
    ORDER BY id DESC
    LIMIT $3
) AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.status = coalesce($5, o.status) OR o.n = $3
ORDER BY o.id DESC
LIMIT $4
