-- S7: ended orders whose idempotency key is missing in Redis, so that a retry of the request would
-- make another order.
--
-- Redis was read after the snapshot, so it has every ended order that needs no release. A rejected
-- order has no release: its units return before its event is acknowledged.
SELECT o.sale_id, o.id AS order_id, o.user_id,
       CASE WHEN r.name IS NULL THEN format('the order is %s, and its idempotency key is missing in Redis: a retry would buy again', o.status)
            ELSE format('the order is %s, and Redis has another record of its idempotency key', o.status) END AS what,
       'rebuild' AS remedy
FROM (
    SELECT DISTINCT ON (sale_id, user_id, key_fingerprint) sale_id, user_id, key_fingerprint, id, quantity, lines, status, sequence
    FROM orders JOIN audit_sales USING (sale_id)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> ''
    ORDER BY sale_id, user_id, key_fingerprint, id DESC -- of two with one key the later one counts
) AS o JOIN audit_figures AS f USING (sale_id)
JOIN audit_shards AS a ON a.sale_id = o.sale_id AND a.shard = (o.sequence % f.shards + f.shards - 1) % f.shards
LEFT JOIN (SELECT DISTINCT ON (sale_id, name) * FROM audit_ended ORDER BY sale_id, name) AS r ON r.sale_id = o.sale_id AND r.name = o.key_fingerprint || o.user_id
WHERE a.present AND a.epoch = f.epoch AND o.sequence <= a.places
  AND (r.order_id, r.quantity, r.lines, r.status) IS DISTINCT FROM (o.id, o.quantity, coalesce(o.lines, ''), o.status)
  AND NOT EXISTS (SELECT FROM releases WHERE order_id = o.id)
  AND NOT EXISTS (SELECT FROM audit_waiting WHERE order_id = o.id)
  -- A later one with the same key has ended since the snapshot.
  AND NOT EXISTS (SELECT FROM orders AS later WHERE later.sale_id = r.sale_id AND later.id = r.order_id AND is_live(later.status))
