-- +goose NO TRANSACTION
-- CONCURRENTLY: a plain CREATE INDEX would block writes to orders.

-- +goose Up
DROP INDEX IF EXISTS orders_due, orders_of_user, orders_paid; -- left by an interrupted attempt
-- The next payment deadlines.
CREATE INDEX CONCURRENTLY orders_due ON orders (due) WHERE status = 'confirmed' AND due IS NOT NULL;
-- A buyer's orders, newest first: ids are in the order of creation.
CREATE INDEX CONCURRENTLY orders_of_user ON orders (user_id, id DESC);
-- The paid units of a sale. All payments would have to lock a counter.
CREATE INDEX CONCURRENTLY orders_paid ON orders (sale_id) INCLUDE (quantity) WHERE status = 'paid';

-- +goose Down
DROP INDEX IF EXISTS orders_paid, orders_of_user, orders_due;
