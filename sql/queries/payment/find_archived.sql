-- The payments $1 that are in archives. The state is the type of the last event.
SELECT reference, version, position, type AS state, order_id, sale_id, amount, currency, coalesce(reason, '') AS reason, received_at, updated_at, data
FROM archived_payments
WHERE reference = ANY ($1)
