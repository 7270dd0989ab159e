-- At most $2 orders of one sale whose time to pay is over, locked until the end of the transaction. Orders locked by
-- others, the sales $1 and the orders $3 are skipped.
--
-- The time is over by the rule of lock_order.sql, which makes it final: an outage moves only deadlines that are later
-- than the last heartbeat before it.
WITH first AS MATERIALIZED (
    SELECT sale_id FROM orders
    WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id <> ALL ($1::uuid[]) AND id <> ALL ($3::uuid[])
    ORDER BY due
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
-- Infinite deadlines are skipped, so that they do not block other orders.
SELECT id, sale_id, user_id, quantity, status, version, CASE WHEN isfinite(reserved_at) THEN reserved_at ELSE 'epoch' END AS reserved_at,
       CASE WHEN isfinite(due) THEN due ELSE 'epoch' END AS expires_at, coalesce(payment_reference, '') AS payment_reference,
       coalesce(reason, '') AS reason
FROM orders
WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id = (SELECT sale_id FROM first)
  AND id <> ALL ($3::uuid[])
ORDER BY due
LIMIT $2
FOR UPDATE SKIP LOCKED
