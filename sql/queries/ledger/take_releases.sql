-- Takes at most $2 due releases of the sale $1 (release_sale.sql), until the end of the transaction, each with its
-- purchase's idempotency key and the order's final status. Releases taken by others are skipped. After a crash of the
-- caller the releases are available again.
SELECT r.sale_id, r.order_id, r.user_id, r.quantity, coalesce(o.lines, '') AS lines, coalesce(o.key_fingerprint, '') AS key_fingerprint,
       coalesce(o.status, '') AS status
FROM releases AS r LEFT JOIN orders AS o ON o.sale_id = $1 AND o.id = r.order_id
WHERE r.sale_id = $1 AND (r.again_at <= now() OR r.again_at > now() + interval '1 minute')
ORDER BY r.again_at
LIMIT $2
FOR UPDATE OF r SKIP LOCKED
