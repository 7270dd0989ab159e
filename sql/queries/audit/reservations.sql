-- S4: reservations in Redis and orders in Postgres that do not match, and wrong releases.
SELECT b.sale_id, b.order_id, b.user_id,
       CASE WHEN NOT is_live(o.status) THEN format('the order is %s and its units are still taken in Redis', o.status)
            ELSE format('the reservation of %s for %s units is the order of %s for %s', b.user_id, concat(b.quantity, ' (' || nullif(b.lines, '') || ')'), o.user_id, concat(o.quantity, ' (' || o.lines || ')'))
       END AS what,
       CASE WHEN (o.user_id, o.quantity, coalesce(o.lines, '')) <> (b.user_id, b.quantity, b.lines) THEN 'rebuild'
            -- A rejected order's units return before its event is acknowledged.
            WHEN EXISTS (SELECT FROM audit_waiting AS w WHERE w.order_id = b.order_id AND NOT parked) THEN 'worker'
            WHEN EXISTS (SELECT FROM audit_waiting AS w WHERE w.order_id = b.order_id) THEN 'dlq'
            ELSE 'release' END AS remedy
FROM audit_buyers AS b JOIN orders AS o ON o.sale_id = b.sale_id AND o.id = b.order_id
WHERE (o.user_id, o.quantity, coalesce(o.lines, '')) <> (b.user_id, b.quantity, b.lines)
   -- A worker will apply what is in releases.
   OR NOT is_live(o.status) AND NOT EXISTS (SELECT FROM releases AS r WHERE r.order_id = o.id)
UNION ALL
-- Reservations without an order get their event again before the sale is rebuilt.
SELECT b.sale_id, b.order_id, b.user_id,
       CASE a.shards WHEN 1 THEN format('the reservation is at place %s, and the sale has given out %s', b.sequence, a.next_place - 1)
                     ELSE format('%sthe reservation is at place %s, and the next place is %s', a.label, b.sequence, a.next_place) END,
       'rebuild'
FROM audit_buyers AS b JOIN audit_shard_figures AS a USING (sale_id, shard) WHERE b.beyond
UNION ALL
-- What a rebuild writes (rebuild/holders.sql). Redis has milliseconds.
SELECT b.sale_id, b.order_id, b.user_id,
       CASE WHEN o.sequence <> b.sequence THEN format('the reservation is at place %s, and the order at place %s', b.sequence, o.sequence)
            WHEN date_trunc('milliseconds', o.reserved_at) <> b.reserved_at THEN format('the reservation is of %s, and the order of %s', b.reserved_at, o.reserved_at)
            ELSE 'the reservation and the order have different idempotency keys: a retry of the request is not recognized' END,
       'rebuild'
FROM audit_buyers AS b JOIN orders AS o ON o.sale_id = b.sale_id AND o.id = b.order_id
WHERE (o.sequence, date_trunc('milliseconds', o.reserved_at), coalesce(o.key_fingerprint, '')) <> (b.sequence, b.reserved_at, b.key_fingerprint)
  AND (o.user_id, o.quantity, coalesce(o.lines, '')) = (b.user_id, b.quantity, b.lines) AND is_live(o.status)
UNION ALL
SELECT o.sale_id, o.id, o.user_id, format('the order is %s and Redis has no reservation of it', o.status), 'rebuild'
FROM orders AS o JOIN audit_sales AS s USING (sale_id)
JOIN audit_shards AS a ON a.sale_id = o.sale_id AND a.shard = (o.sequence % s.shards + s.shards - 1) % s.shards
WHERE a.present AND is_live(o.status) AND o.sequence <= a.places
  AND NOT EXISTS (SELECT FROM audit_buyers AS b WHERE b.order_id = o.id)
UNION ALL
SELECT r.sale_id, r.order_id, r.user_id, format('a release is pending, and the order is %s', coalesce(o.status, 'missing')), 'forget'
FROM releases AS r JOIN audit_sales USING (sale_id) LEFT JOIN orders AS o ON o.sale_id = r.sale_id AND o.id = r.order_id
WHERE o.status IS NULL OR is_live(o.status)
