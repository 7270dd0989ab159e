-- The events of orders after the position $1, up to $2, in the order of their positions: at most $3 of them, and others
-- at the position of the last one.
-- A later event of an order has its reservation's time from the first one. An order that was never decided
-- (OrderReserved) has no event for others.
SELECT e.position, e.order_id, e.sale_id, e.user_id, e.quantity, CASE WHEN e.lines IS NOT NULL THEN order_items(e.sale_id, e.lines) END AS items, e.version, e.type, e.occurred_at,
       coalesce(e.reserved_at, first.reserved_at) AS reserved_at,
       CASE e.type WHEN 'OrderConfirmed' THEN e.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN e.pay_from IS NOT NULL THEN e.due + coalesce(p.lost, lost_time()) - make_interval(secs => s.payment_window_seconds) END AS pay_from,
       coalesce(CASE WHEN e.lines IS NULL THEN s.unit_price * e.quantity ELSE order_amount(e.sale_id, s.unit_price, e.quantity, e.lines) END, 0) AS amount, coalesce(s.currency, '') AS currency,
       coalesce(e.data ->> 'reference', '') AS payment_reference, coalesce(e.data ->> 'reason', '') AS reason,
       (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = e.sale_id) AS entry_for, s.offers_only IS TRUE AS offers_only,
       coalesce(e.key_fingerprint, first.key_fingerprint, '') AS key_fingerprint, coalesce(e.data ->> 'operator', '') AS operator, coalesce(e.data ->> 'traceparent', '') AS trace_parent
FROM (
    SELECT * FROM order_events WHERE position > $1 AND position <= $2 AND type <> 'OrderReserved' ORDER BY position FETCH FIRST $3 ROWS WITH TIES
) AS e
LEFT JOIN pulse AS p ON true
-- For each event by itself: Postgres may read all events for a join.
LEFT JOIN LATERAL (
    SELECT f.reserved_at, f.key_fingerprint FROM order_events AS f
    WHERE e.reserved_at IS NULL AND f.sale_id = e.sale_id AND f.order_id = e.order_id AND f.version = 2 LIMIT 1) AS first ON true
LEFT JOIN LATERAL (SELECT unit_price, currency, payment_window_seconds, offers_only FROM sales WHERE id = e.sale_id LIMIT 1) AS s ON true -- the limit keeps the order of events
ORDER BY e.position
