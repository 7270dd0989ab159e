-- The order $1 of the user $2, locked until the end of the transaction, and whether its time to pay is over.
--
-- $3 how old the pulse has to be to mean an outage. While there is one, an order is in time if it was when
-- the outage began: the next pulse will put its deadline off.
SELECT o.id, o.sale_id, o.user_id, o.quantity, o.status, o.version, o.reserved_at,
       CASE o.status WHEN 'confirmed' THEN o.expires_at END, coalesce(o.payment_reference, ''), coalesce(o.reason, ''),
       coalesce(o.expires_at <= now() AND (o.expires_at <= p.seen_at OR p.seen_at >= now() - $3::interval), false) AS overdue
FROM orders AS o LEFT JOIN pulse AS p ON true
WHERE o.id = $1 AND o.user_id = $2
FOR UPDATE OF o
