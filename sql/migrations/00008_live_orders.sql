-- +goose NO TRANSACTION
-- CONCURRENTLY: a plain CREATE INDEX would block writes to orders.

-- +goose Up
DROP INDEX IF EXISTS orders_one_live_next, orders_live, orders_ended_of_user; -- left by an interrupted attempt
-- At most one live order per user and sale. The user comes first, so that the index also finds a
-- buyer's live orders: a new order has no entry in the next index.
CREATE UNIQUE INDEX CONCURRENTLY orders_one_live_next ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid');
-- A buyer's ended orders, newest first: ids are in the order of creation.
CREATE INDEX CONCURRENTLY orders_ended_of_user ON orders (user_id, id DESC) WHERE status NOT IN ('confirmed', 'paid');
-- The live orders of a sale. Its entries are equal, so Postgres deduplicates them.
CREATE INDEX CONCURRENTLY orders_live ON orders (sale_id) WHERE status IN ('confirmed', 'paid');
-- In one step, so that an interrupted attempt leaves one of the two.
-- +goose StatementBegin
DO $$
BEGIN
    DROP INDEX IF EXISTS orders_one_live_per_user;
    ALTER INDEX orders_one_live_next RENAME TO orders_one_live_per_user;
END
$$;
-- +goose StatementEnd
DROP INDEX IF EXISTS orders_of_user;

-- +goose Down
DROP INDEX IF EXISTS orders_one_live_next, orders_of_user; -- left by an interrupted attempt
CREATE UNIQUE INDEX CONCURRENTLY orders_one_live_next ON orders (sale_id, user_id) WHERE status IN ('confirmed', 'paid');
CREATE INDEX CONCURRENTLY orders_of_user ON orders (user_id, id DESC);
-- +goose StatementBegin
DO $$
BEGIN
    DROP INDEX IF EXISTS orders_one_live_per_user;
    ALTER INDEX orders_one_live_next RENAME TO orders_one_live_per_user;
END
$$;
-- +goose StatementEnd
DROP INDEX IF EXISTS orders_live, orders_ended_of_user;
