-- The next $3 orders of the sale $1 after the order $2, in the order in which they were made: all, or those with the status $4
-- that were reserved from $5 to before $6. Each of $4 to $6 may be NULL.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN o.pay_from IS NOT NULL THEN o.due + coalesce(p.lost, lost_time()) - make_interval(secs => sale.payment_window_seconds) END AS pay_from,
       CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = o.sale_id) AS entry_for, sale.offers_only IS TRUE AS offers_only, coalesce(o.key_fingerprint, '') AS key_fingerprint, o.sequence, o.epoch
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.sale_id = $1 AND o.id > $2 AND ($4::text IS NULL OR o.status = $4)
  AND ($5::timestamptz IS NULL OR o.reserved_at >= $5) AND ($6::timestamptz IS NULL OR o.reserved_at < $6)
ORDER BY o.id
LIMIT $3
