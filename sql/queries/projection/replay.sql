-- The orders of a month as their log has them, with which two queries compare and replace rows.
-- $1, $2 the sales from $1 to before $2
SELECT order_id AS id, sale_id,
       (array_agg(user_id) FILTER (WHERE version = 2))[1] AS user_id,
       (array_agg(quantity) FILTER (WHERE version = 2))[1] AS quantity,
       lower(substr((array_agg(type ORDER BY version DESC))[1], length('Order') + 1)) AS status,
       max(version) AS version,
       (max(data ->> 'sequence') FILTER (WHERE version = 2))::bigint AS sequence,
       (max(data ->> 'epoch') FILTER (WHERE version = 2))::bigint AS epoch,
       max(reserved_at) FILTER (WHERE version = 2) AS reserved_at,
       (array_agg(occurred_at ORDER BY version DESC))[1] AS updated_at,
       -- An operator's reason for a cancellation is in the log only.
       max(data ->> 'reason') FILTER (WHERE version = 2) AS reason,
       (max(data ->> 'due'))::timestamptz AS due,
       max(data ->> 'reference') AS payment_reference,
       max(data ->> 'key_fingerprint') AS key_fingerprint
FROM order_events
WHERE sale_id >= $1 AND sale_id < $2
GROUP BY sale_id, order_id
