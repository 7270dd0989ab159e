-- +goose NO TRANSACTION
-- Built beside what writes to orders, which a plain CREATE INDEX would keep waiting.

-- +goose Up
DROP INDEX IF EXISTS orders_due, orders_of_user, orders_paid; -- what an attempt that was broken off left behind
-- Whose time to pay ends next.
CREATE INDEX CONCURRENTLY orders_due ON orders (due) WHERE status = 'confirmed' AND due IS NOT NULL;
-- A buyer's orders, newest first: ids are in the order of their making.
CREATE INDEX CONCURRENTLY orders_of_user ON orders (user_id, id DESC);
-- The units of a sale that are paid for, without a counter for which all who pay would wait.
CREATE INDEX CONCURRENTLY orders_paid ON orders (sale_id) INCLUDE (quantity) WHERE status = 'paid';

-- +goose Down
DROP INDEX IF EXISTS orders_paid, orders_of_user, orders_due;
