-- The orders of the sale $1 with the ids $2.
--
-- LATERAL and LIMIT make Postgres look for each of them by the index. In the first minute of a sale it has no statistics, and would
-- read all orders of the sale, by a plan that it keeps from when the tables were empty.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN o.pay_from IS NOT NULL THEN o.due + coalesce(p.lost, lost_time()) - make_interval(secs => sale.payment_window_seconds) END AS pay_from,
       CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = o.sale_id) AS entry_for, sale.offers_only IS TRUE AS offers_only, coalesce(o.key_fingerprint, '') AS key_fingerprint
FROM unnest($2::uuid[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $1 AND id = wanted.id LIMIT 1) AS o
LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = $1
