-- ended_orders.sql for a sale with items: their lines are not in its index.
-- $1 sale
SELECT DISTINCT ON (user_id, key_fingerprint) user_id, key_fingerprint, id, quantity, status, coalesce(lines, '') AS lines
FROM orders
WHERE sale_id = $1 AND status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> ''
ORDER BY user_id, key_fingerprint, id DESC
