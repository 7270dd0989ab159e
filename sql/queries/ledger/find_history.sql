-- The order $2 of the sale $1, once for each event in its log, in their order. It is one statement, so order and log are of
-- one moment. Without a log, the event's version is 0. The events have no due and no pay_from: those of the order
-- are in force, which outages postpone. They have no lines: those of the order are the same.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN o.pay_from IS NOT NULL THEN o.due + coalesce(p.lost, lost_time()) - make_interval(secs => sale.payment_window_seconds) END AS pay_from,
       CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = o.sale_id) AS entry_for, sale.offers_only IS TRUE AS offers_only, coalesce(o.key_fingerprint, '') AS key_fingerprint, o.sequence, o.epoch,
       coalesce(e.version, 0) AS event_version, coalesce(e.type, '') AS event_type, coalesce(e.occurred_at, 'epoch') AS event_at, coalesce(e.data - '{due,pay_from,lines}'::text[], '{}') AS event_data
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
LEFT JOIN order_history AS e ON e.sale_id = $1 AND e.order_id = $2
WHERE o.sale_id = $1 AND o.id = $2
ORDER BY e.version
