-- Writes the rows that one confirmed order has in the product's ledger
-- (sql/queries/ledger/record_orders.sql): its event and the order itself. Outside a transaction it
-- is its own transaction in one round trip.
--
-- $1 order, $2 sale, $3 user, $4 quantity, $5 reserved at, $6 sequence: its place in the sale
--
-- An existing order stays unchanged, so a delivery may be repeated.
WITH placed AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, key_fingerprint)
    VALUES ($1, $2, $3, $4, 'confirmed', 2, $6, 1, $5, now(), NULL)
    ON CONFLICT (sale_id, id) DO NOTHING
    RETURNING id, sale_id, user_id, quantity, sequence, epoch, reserved_at, updated_at
)
INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch)
SELECT id, 2, 'OrderConfirmed', sale_id, user_id, quantity, updated_at, reserved_at, sequence, epoch
FROM placed
