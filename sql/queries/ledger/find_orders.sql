-- The orders of the sale $1 with the ids $2.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at, o.updated_at,
       CASE o.status WHEN 'confirmed' THEN o.due + coalesce(p.lost, lost_time()) END AS expires_at,
       o.pay_from, sale.unit_price * o.quantity AS amount, sale.currency, coalesce(o.payment_reference, '') AS payment_reference,
       coalesce(o.reason, '') AS reason
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.sale_id = $1 AND o.id = ANY ($2::uuid[])
