-- The payments whose references begin with $1, up to $2, in the order of the references: at most $3.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at, data
FROM payments
WHERE reference >= $1 AND reference < $2
ORDER BY reference
LIMIT $3
