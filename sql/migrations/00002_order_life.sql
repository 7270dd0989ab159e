-- +goose Up

-- The payment deadline of a confirmed order, on the clock pay_clock(); NULL if its sale has no payment window.
ALTER TABLE orders ADD COLUMN due timestamptz;
-- The payment provider's reference for the payment of a paid order.
ALTER TABLE orders ADD COLUMN payment_reference text;
-- Fingerprint of the purchase's idempotency key, by which a rebuilt Redis recognizes a retry.
ALTER TABLE orders ADD COLUMN key_fingerprint text;

-- The highest place in the sale that a confirmed order has had. A Redis with a lower sequence lost orders.
ALTER TABLE sales ADD COLUMN last_sequence bigint NOT NULL DEFAULT 0;

-- The last heartbeat of any ingress, and the total time without one: one row. If it is deleted,
-- heartbeat.sql inserts it again; until then no order is overdue.
CREATE TABLE pulse (
    one_row      boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    seen_at      timestamptz NOT NULL,
    -- The sum of the table outages.
    lost         interval NOT NULL DEFAULT '0',
    -- A longer time without a heartbeat is an outage. Long enough to restart an ingress.
    outage_after interval NOT NULL DEFAULT '5 seconds'
);
-- The time until the first heartbeat counts as an outage.
INSERT INTO pulse (seen_at) VALUES (now());

-- Times without an ingress, in which payments were impossible.
CREATE TABLE outages (
    began_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL CHECK (ended_at > began_at),
    PRIMARY KEY (began_at, ended_at)
);

-- pulse.lost, also while its row is missing.
-- +goose StatementBegin
CREATE FUNCTION lost_time() RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT lost FROM pulse), (SELECT sum(ended_at - began_at) FROM outages), '0')
$$;
-- +goose StatementEnd

-- The clock of deadlines. It stands still during outages, so it is behind now() by their sum: an outage
-- postpones all deadlines with one write.
-- +goose StatementBegin
CREATE FUNCTION pay_clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT CASE WHEN now() - seen_at > outage_after THEN seen_at END FROM pulse), now()) - lost_time()
$$;
-- +goose StatementEnd

-- Units of cancelled and expired orders that must be returned to Redis. A row is inserted with the event
-- that ends the order, and deleted when Redis has its units back.
CREATE TABLE releases (
    order_id   uuid PRIMARY KEY,
    sale_id    uuid NOT NULL,
    user_id    text NOT NULL,
    quantity   bigint NOT NULL CHECK (quantity > 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- How often Redis refused the units or lacked the sale, and the time of the next try.
    refusals   integer NOT NULL DEFAULT 0,
    again_at   timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX releases_due ON releases (again_at);
CREATE INDEX releases_of_sale ON releases (sale_id, again_at);
CREATE INDEX releases_refused ON releases (order_id) WHERE refusals > 0;

-- The stream entry of the dead letter's last replay.
ALTER TABLE dead_letters ADD COLUMN replayed_as text;

-- The Redis server that holds a partition's stock, as last verified. Another server, or this one after a
-- restart, may lack accepted orders.
CREATE TABLE redis_servers (
    partition      integer PRIMARY KEY,
    run_id         text NOT NULL,
    replication_id text NOT NULL,
    vouched_at     timestamptz NOT NULL DEFAULT now()
);

-- The key with which all ingresses sign receipts: one row.
CREATE TABLE receipt_key (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    secret  bytea NOT NULL CHECK (octet_length(secret) >= 32)
);
-- Each gen_random_uuid has 122 random bits from the server's strong source.
INSERT INTO receipt_key (secret) VALUES (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- +goose Down
DROP TABLE receipt_key, redis_servers, releases;
DROP FUNCTION pay_clock(), lost_time();
DROP TABLE outages, pulse;
ALTER TABLE dead_letters DROP COLUMN replayed_as;
ALTER TABLE sales DROP COLUMN last_sequence;
ALTER TABLE orders DROP COLUMN key_fingerprint, DROP COLUMN payment_reference, DROP COLUMN due;
