-- Takes at most $2 releases of one sale, until the end of the transaction, each with its purchase's idempotency key and
-- the order's final status. Releases taken by others, and the sales $1, are skipped. After a crash of the caller the
-- releases are available again.
WITH first AS MATERIALIZED (
    SELECT sale_id FROM releases
    WHERE again_at <= now() AND sale_id <> ALL ($1::uuid[])
    ORDER BY again_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
SELECT r.sale_id, r.order_id, r.user_id, r.quantity, coalesce(o.key_fingerprint, '') AS key_fingerprint,
       coalesce(o.status, '') AS status
FROM releases AS r LEFT JOIN orders AS o ON o.id = r.order_id
WHERE r.again_at <= now() AND r.sale_id = (SELECT sale_id FROM first)
ORDER BY r.again_at
LIMIT $2
FOR UPDATE OF r SKIP LOCKED
