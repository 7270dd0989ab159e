-- The orders of a sale that were made with an idempotency key and have ended, as a rebuilt Redis has to know them: the
-- request that made one never makes another. Of two with one key the later one counts.
-- $1 sale
SELECT DISTINCT ON (user_id, key_fingerprint) user_id, key_fingerprint, id, quantity, status
FROM orders
WHERE sale_id = $1 AND status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> ''
ORDER BY user_id, key_fingerprint, id DESC
