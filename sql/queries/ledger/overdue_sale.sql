-- A sale, not one of $1, with an order whose time to pay is over; the transaction locks that order. Orders locked by others
-- and the orders $2 are skipped.
--
-- The time to pay is over when an ingress has sent a heartbeat (seen_at) after the deadline: until then no ingress may have
-- been up to take the payment, and the next heartbeat may add an outage to lost, which moves the deadline. An outage moves
-- only deadlines after the last heartbeat before it, so an order that is overdue stays overdue.
SELECT sale_id FROM orders
WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id <> ALL ($1::uuid[]) AND id <> ALL ($2::uuid[])
ORDER BY due
LIMIT 1
FOR UPDATE SKIP LOCKED
