-- +goose NO TRANSACTION
-- +goose Up

-- The events of each type in the order of the log, of all payments and of those of a sale.
CREATE INDEX CONCURRENTLY IF NOT EXISTS payment_events_of_type ON payment_events (type, position);
CREATE INDEX CONCURRENTLY IF NOT EXISTS payment_events_of_sale_and_type ON payment_events (sale_id, type, position);

-- +goose Down
DROP INDEX payment_events_of_type, payment_events_of_sale_and_type;
