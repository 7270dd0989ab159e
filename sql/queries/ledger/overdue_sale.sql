-- A sale, not one of $1, with an order whose time to pay is over; the transaction locks that order. Orders locked by others
-- and the orders $2 are skipped.
--
-- The time to pay is over when an ingress has sent a heartbeat (seen_at) after the deadline: until then no ingress may have
-- been up to take the payment, and the next heartbeat may add an outage to lost, which moves the deadline. An outage moves
-- only deadlines after the last heartbeat before it, so an order that is overdue stays overdue. Of a sale with a grace an
-- order is overdue that much later.
SELECT o.sale_id
FROM orders AS o LEFT JOIN sales AS s ON s.id = o.sale_id CROSS JOIN (SELECT least(seen_at, now()) - lost AS clock FROM pulse OFFSET 0) AS p
WHERE o.status = 'confirmed' AND o.due <= (SELECT least(seen_at, now()) - lost FROM pulse)
  AND o.due + make_interval(secs => coalesce(s.payment_grace_seconds, 0)) <= p.clock AND o.sale_id <> ALL ($1::uuid[]) AND o.id <> ALL ($2::uuid[])
ORDER BY o.due
LIMIT 1
FOR UPDATE OF o SKIP LOCKED
