-- +goose Up
-- contract: open_payments and the indexes of 00005 have taken the places of these
CREATE TABLE IF NOT EXISTS schema_contracts (
    migration bigint PRIMARY KEY, works_from bigint NOT NULL, release text NOT NULL);
INSERT INTO schema_contracts (migration, works_from, release) VALUES (8, 1, 'v0.1.0');

SET LOCAL lock_timeout = '3s';
DROP INDEX payment_events_waiting, payment_events_refund_due, payment_events_of_sale;

-- +goose Down
CREATE INDEX payment_events_of_sale ON payment_events (sale_id);
CREATE INDEX payment_events_waiting ON payment_events (position) WHERE type = 'PaymentReceived' AND sale_id IS NULL;
CREATE INDEX payment_events_refund_due ON payment_events (position) WHERE type = 'PaymentRefundDue';
DELETE FROM schema_contracts WHERE migration = 8;
