-- At most $2 orders of one sale whose time to pay is over, locked until the end of the transaction. What
-- others have locked is passed over, and so are the sales $1.
--
-- Time is over by the rule of lock_order.sql, which makes it final: an outage moves only deadlines that
-- are later than the last pulse before it.
WITH first AS MATERIALIZED (
    SELECT sale_id FROM orders
    WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id <> ALL ($1::uuid[])
    ORDER BY due
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
SELECT id, sale_id, user_id, quantity, status, version, reserved_at,
       due, coalesce(payment_reference, ''), coalesce(reason, '')
FROM orders
WHERE status = 'confirmed' AND due <= (SELECT least(seen_at, now()) - lost FROM pulse) AND sale_id = (SELECT sale_id FROM first)
ORDER BY due
LIMIT $2
FOR UPDATE SKIP LOCKED
