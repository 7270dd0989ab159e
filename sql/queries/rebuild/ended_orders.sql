-- The ended orders of a sale that have an idempotency key, which a rebuilt Redis must know: a key that made an order
-- never makes another one. Of two orders with one key the later one counts.
-- $1 sale
SELECT DISTINCT ON (user_id, key_fingerprint) user_id, key_fingerprint, id, quantity, status
FROM orders
WHERE sale_id = $1 AND status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> ''
ORDER BY user_id, key_fingerprint, id DESC
