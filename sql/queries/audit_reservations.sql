-- S4: reservations in Redis and orders in Postgres that do not match.
SELECT b.sale_id, b.order_id, b.user_id,
       CASE WHEN o.status NOT IN ('confirmed', 'paid') THEN format('the order is %s and its units are still taken in Redis', o.status)
            ELSE format('the reservation of %s for %s units is the order of %s for %s', b.user_id, b.quantity, o.user_id, o.quantity)
       END AS what
FROM audit_buyers AS b JOIN orders AS o ON o.id = b.order_id
WHERE o.status NOT IN ('confirmed', 'paid') OR (o.sale_id, o.user_id, o.quantity) <> (b.sale_id, b.user_id, b.quantity)
UNION ALL
SELECT o.sale_id, o.id, o.user_id, format('the order is %s and Redis has no reservation of it', o.status)
FROM orders AS o JOIN audit_sales AS a USING (sale_id)
WHERE a.present AND o.status IN ('confirmed', 'paid') AND o.sequence <= a.places
  AND NOT EXISTS (SELECT FROM audit_buyers AS b WHERE b.order_id = o.id)
