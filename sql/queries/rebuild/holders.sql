-- The live orders of a sale, which a rebuilt Redis must know.
-- $1 sale
SELECT user_id, id, quantity, sequence, reserved_at, coalesce(key_fingerprint, '') AS key_fingerprint, epoch,
       coalesce(lines, '') AS lines
FROM orders WHERE sale_id = $1 AND is_live(status)
