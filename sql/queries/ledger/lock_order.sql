-- The order $2 of the sale $1 and the user $3, or of any user if that is NULL, locked until the end of the transaction, and whether its time to pay is over.
--
-- The rule of overdue is in overdue_sale.sql.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       o.pay_from, CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason,
       o.sequence, o.epoch, coalesce(o.due + make_interval(secs => coalesce(sale.payment_grace_seconds, 0)) <= least(p.seen_at, now()) - p.lost, false) AS overdue
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.sale_id = $1 AND o.id = $2 AND o.user_id = coalesce($3, o.user_id)
  AND sale.archived_at IS NULL -- else it is about to be deleted
FOR UPDATE OF o
