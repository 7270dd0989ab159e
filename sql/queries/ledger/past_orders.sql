-- What the user $2 has in the sale $1, of which Redis has no buyers any more (lua/retire.lua): the live order, and the
-- latest ended one that was made with the idempotency key whose fingerprint is $3; NULL for none.
SELECT id, quantity, lines, CASE WHEN lines IS NOT NULL THEN order_items($1, lines) END AS items, sequence, epoch, reserved_at, status, coalesce(key_fingerprint, '') AS key_fingerprint
FROM (
    SELECT * FROM orders WHERE sale_id = $1 AND user_id = $2 AND is_live(status)
    UNION ALL
    (SELECT * FROM orders
     WHERE sale_id = $1 AND user_id = $2 AND key_fingerprint = $3 AND key_fingerprint <> ''
       AND status IN ('cancelled', 'expired', 'rejected')
     ORDER BY id DESC
     LIMIT 1)
) AS past
