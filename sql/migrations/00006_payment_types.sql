-- +goose Up
-- contract: payments have more kinds of events than the CHECK of programs before it knows; they take these for refunded
CREATE TABLE IF NOT EXISTS schema_contracts (
    migration bigint PRIMARY KEY, works_from bigint NOT NULL, release text NOT NULL);
INSERT INTO schema_contracts (migration, works_from, release) VALUES (6, 1, 'v0.1.0');

SET LOCAL lock_timeout = '3s';
ALTER TABLE payment_events DROP CONSTRAINT payment_events_type_check;

-- +goose Down
ALTER TABLE payment_events ADD CONSTRAINT payment_events_type_check
    CHECK (type IN ('PaymentReceived', 'PaymentSettled', 'PaymentRefundDue', 'PaymentRefunded')) NOT VALID;
DELETE FROM schema_contracts WHERE migration = 6;
