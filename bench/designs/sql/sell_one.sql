-- Sells to one buyer, and writes the rows that the order has in the product's ledger
-- (sql/queries/ledger/record_orders.sql). It is its own transaction.
--
-- $1 order, $2 sale, $3 user, $4 quantity
--
-- Returns a word: confirmed, already-purchased or sold-out. While units are left, the unique index of
-- live orders refuses a user who has an order: the statement fails, and the unit is not taken.
WITH sale AS (
    UPDATE sales SET sold = sold + $4, last_sequence = last_sequence + $4
    WHERE id = $2 AND sold + $4 <= stock
    RETURNING last_sequence AS sequence, epoch
), placed AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, key_fingerprint)
    SELECT $1, $2, $3, $4, 'confirmed', 2, sequence, epoch, now(), now(), NULL
    FROM sale
), logged AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch)
    SELECT $1, 2, 'OrderConfirmed', $2, $3, $4, now(), now(), sequence, epoch
    FROM sale
)
SELECT CASE
    WHEN EXISTS (SELECT FROM sale) THEN 'confirmed'
    WHEN EXISTS (SELECT FROM orders WHERE sale_id = $2 AND user_id = $3 AND status IN ('confirmed', 'paid')) THEN 'already-purchased'
    ELSE 'sold-out'
END
