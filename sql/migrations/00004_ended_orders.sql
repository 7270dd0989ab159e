-- +goose NO TRANSACTION
-- Built beside what writes to orders, which a plain CREATE INDEX would keep waiting.

-- +goose Up
DROP INDEX IF EXISTS orders_ended; -- what an attempt that was broken off left behind
-- What a rebuilt Redis is told of a sale's ended orders (ended_orders.sql). Nothing is added to it before an order ends.
CREATE INDEX CONCURRENTLY orders_ended ON orders (sale_id, user_id, key_fingerprint, id DESC) INCLUDE (quantity, status)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> '';

-- +goose Down
DROP INDEX IF EXISTS orders_ended;
