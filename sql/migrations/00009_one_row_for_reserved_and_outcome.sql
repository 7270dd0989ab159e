-- +goose Up
-- The first row of an order in the log is its outcome: OrderConfirmed, OrderRejected or OrderVoided. It has version 2
-- and both times: reserved_at is Redis's clock at the reservation, occurred_at the decision of Postgres. Later rows
-- have no reserved_at.
ALTER TABLE order_events ADD COLUMN reserved_at timestamptz;
UPDATE order_events AS outcome SET reserved_at = reserved.occurred_at, data = reserved.data || outcome.data
FROM order_events AS reserved
WHERE reserved.order_id = outcome.order_id AND reserved.version = 1 AND outcome.version = 2;
DELETE FROM order_events AS reserved
USING order_events AS outcome
WHERE outcome.order_id = reserved.order_id AND reserved.version = 1 AND outcome.version = 2;
-- A reservation without an outcome was written by no worker. It stays in the log, and the audit names it.
UPDATE order_events SET version = 2, reserved_at = occurred_at WHERE version = 1;
ALTER TABLE order_events DROP CONSTRAINT order_events_version_check;
ALTER TABLE order_events ADD CONSTRAINT order_events_version_check CHECK (version > 1);

-- The log with a row for each event. The reservation has the position of its outcome.
CREATE VIEW order_history AS
SELECT position, order_id, 1 AS version, 'OrderReserved' AS type, sale_id, user_id, quantity, reserved_at AS occurred_at,
       data - '{reason,due}'::text[] AS data
FROM order_events
WHERE reserved_at IS NOT NULL
UNION ALL
SELECT position, order_id, version, type, sale_id, user_id, quantity, occurred_at,
       CASE version WHEN 2 THEN data - '{sequence,epoch,key_fingerprint}'::text[] ELSE data END
FROM order_events
WHERE type <> 'OrderReserved';

-- +goose Down
DROP VIEW order_history;
ALTER TABLE order_events DROP CONSTRAINT order_events_version_check;
ALTER TABLE order_events ADD CONSTRAINT order_events_version_check CHECK (version > 0);
UPDATE order_events SET version = 1 WHERE version = 2 AND type = 'OrderReserved';
INSERT INTO order_events (position, order_id, version, type, sale_id, user_id, quantity, occurred_at, data)
OVERRIDING SYSTEM VALUE
SELECT position, order_id, 1, 'OrderReserved', sale_id, user_id, quantity, reserved_at, data - '{reason,due}'::text[]
FROM order_events WHERE version = 2 AND reserved_at IS NOT NULL;
UPDATE order_events SET data = data - '{sequence,epoch,key_fingerprint}'::text[] WHERE version = 2 AND reserved_at IS NOT NULL;
ALTER TABLE order_events DROP COLUMN reserved_at;
