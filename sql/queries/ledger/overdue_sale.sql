-- A sale, not one of $1, with an order whose time to pay is over, of which this transaction locks one. Orders locked by
-- others and the orders $2 are skipped.
--
-- The time is over by the rule of lock_order.sql, which makes it final: an outage moves only deadlines that are later
-- than the last heartbeat before it.
SELECT sale_id FROM orders
WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id <> ALL ($1::uuid[]) AND id <> ALL ($2::uuid[])
ORDER BY due
LIMIT 1
FOR UPDATE SKIP LOCKED
