-- Sells the units of the sale to the first purchases of a batch, and writes the rows that their orders
-- have in the product's ledger (sql/queries/ledger/record_orders.sql). The sale is locked
-- (lock_sale.sql).
--
-- $1     sale $2..$4 order, user and quantity of each purchase as columns, in the order of arrival,
-- each user once
--
-- Returns a row for each purchase that this call did not write:
--   its place in the columns, counted from 1
--   the live order of its user, or NULL; the purchase's own order if an earlier call has written it
--   the units that are left now
WITH sale AS (
    SELECT last_sequence, epoch, stock - sold AS room FROM sales WHERE id = $1
), entry AS (
    SELECT *, sum(quantity) OVER (ORDER BY place) AS up_to
    FROM unnest($2::uuid[], $3::text[], $4::bigint[]) WITH ORDINALITY AS e (id, user_id, quantity, place)
), placed AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, key_fingerprint)
    SELECT id, $1, user_id, quantity, 'confirmed', 2, last_sequence + up_to, epoch, now(), now(), NULL
    FROM entry CROSS JOIN sale
    WHERE up_to <= room
    ON CONFLICT DO NOTHING
    RETURNING id, user_id, quantity, sequence, epoch
), logged AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch)
    SELECT id, 2, 'OrderConfirmed', $1, user_id, quantity, now(), now(), sequence, epoch
    FROM placed
), total AS (
    SELECT coalesce(sum(quantity), 0) AS units, max(sequence) AS last_sequence FROM placed
), counted AS (
    UPDATE sales SET sold = sold + units, last_sequence = total.last_sequence
    FROM total
    WHERE id = $1 AND units > 0
)
SELECT place,
       (SELECT o.id FROM orders AS o
        WHERE o.sale_id = $1 AND o.user_id = entry.user_id AND o.status IN ('confirmed', 'paid')),
       (SELECT room FROM sale) - (SELECT units FROM total)
FROM entry
WHERE NOT EXISTS (SELECT FROM placed WHERE placed.id = entry.id)
