-- An order, as orderRow in ledger/ledger.go reads it. The query has its row as o, that of its sale as sale, and that of pulse as p;
-- the last two may be missing.
o.id, o.sale_id, o.user_id, o.quantity, o.lines, CASE WHEN o.lines IS NOT NULL THEN order_items(o.sale_id, o.lines) END AS items, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       CASE WHEN o.pay_from IS NOT NULL THEN o.due + coalesce(p.lost, lost_time()) - sale.payment_window_seconds * interval '1 second' END AS pay_from,
       CASE WHEN o.lines IS NULL THEN sale.unit_price * o.quantity ELSE order_amount(o.sale_id, sale.unit_price, o.quantity, o.lines) END AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason, (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = o.sale_id) AS entry_for, sale.offers_only IS TRUE AS offers_only, coalesce(o.key_fingerprint, '') AS key_fingerprint
