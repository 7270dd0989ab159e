-- +goose NO TRANSACTION
-- CONCURRENTLY: a plain CREATE INDEX would block writes to orders.

-- +goose Up
DROP INDEX IF EXISTS orders_ended; -- left by an interrupted attempt
-- The ended orders that a rebuilt Redis must know (ended_orders.sql). Live orders have no entry.
CREATE INDEX CONCURRENTLY orders_ended ON orders (sale_id, user_id, key_fingerprint, id DESC) INCLUDE (quantity, status)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> '';

-- +goose Down
DROP INDEX IF EXISTS orders_ended;
