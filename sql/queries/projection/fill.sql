-- Fills orders_next from the log: the orders $1, or all if it is NULL.
INSERT INTO orders_next (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at,
                         reason, due, payment_reference, key_fingerprint)
SELECT order_id,
       (array_agg(sale_id) FILTER (WHERE version = 2))[1],
       (array_agg(user_id) FILTER (WHERE version = 2))[1],
       (array_agg(quantity) FILTER (WHERE version = 2))[1],
       lower(substr((array_agg(type ORDER BY version DESC))[1], length('Order') + 1)),
       max(version),
       (max(data ->> 'sequence') FILTER (WHERE version = 2))::bigint,
       (max(data ->> 'epoch') FILTER (WHERE version = 2))::bigint,
       max(reserved_at) FILTER (WHERE version = 2),
       (array_agg(occurred_at ORDER BY version DESC))[1],
       max(data ->> 'reason'),
       (max(data ->> 'due'))::timestamptz,
       max(data ->> 'reference'),
       max(data ->> 'key_fingerprint')
FROM order_events
WHERE $1::uuid[] IS NULL OR order_id = ANY ($1)
GROUP BY order_id
