-- +goose Up

-- Until when a confirmed order has to be paid, by pay_clock() below; NULL if its sale has no payment window.
ALTER TABLE orders ADD COLUMN due timestamptz;
-- The payment provider's name for the payment of a paid order.
ALTER TABLE orders ADD COLUMN payment_reference text;
-- Fingerprint of the idempotency key of the purchase: with it a rebuilt Redis knows the buyer's repeat.
ALTER TABLE orders ADD COLUMN key_fingerprint text;

-- The highest place in the sale that a confirmed order has had: a Redis that is behind it was set back.
ALTER TABLE sales ADD COLUMN last_sequence bigint NOT NULL DEFAULT 0;

-- When an ingress could last write to Postgres, and for how long in all there was none: one row. If it is
-- gone, beat.sql makes it anew; until then nothing is overdue.
CREATE TABLE pulse (
    one_row      boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    seen_at      timestamptz NOT NULL,
    -- The sum of the table outages.
    lost         interval NOT NULL DEFAULT '0',
    -- How long no ingress may be there before that counts as an outage: some missed beats, so that one
    -- that is restarted is none.
    outage_after interval NOT NULL DEFAULT '5 seconds'
);
-- From now on, so that the time until the first one comes counts as an outage.
INSERT INTO pulse (seen_at) VALUES (now());

-- Times in which nobody could pay.
CREATE TABLE outages (
    began_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL CHECK (ended_at > began_at),
    PRIMARY KEY (began_at, ended_at)
);

-- pulse.lost, also while its row is not there.
-- +goose StatementBegin
CREATE FUNCTION lost_time() RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT lost FROM pulse), (SELECT sum(ended_at - began_at) FROM outages), '0')
$$;
-- +goose StatementEnd

-- The clock of deadlines. It stands still during outages, and goes behind now() by the sum of them: so an
-- outage puts off all deadlines at once, however many there are.
-- +goose StatementBegin
CREATE FUNCTION pay_clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT CASE WHEN now() - seen_at > outage_after THEN seen_at END FROM pulse), now()) - lost_time()
$$;
-- +goose StatementEnd

-- Units of cancelled and expired orders that Redis has not been told of. A row comes with the event
-- that ends the order and goes when Redis has its units back.
CREATE TABLE releases (
    order_id   uuid PRIMARY KEY,
    sale_id    uuid NOT NULL,
    user_id    text NOT NULL,
    quantity   bigint NOT NULL CHECK (quantity > 0),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- How often Redis knew nothing of the sale or could not take the units, and when it is asked again.
    refusals   integer NOT NULL DEFAULT 0,
    again_at   timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX releases_due ON releases (again_at);
CREATE INDEX releases_of_sale ON releases (sale_id, again_at);
CREATE INDEX releases_refused ON releases (order_id) WHERE refusals > 0;

-- The entry as which a dead letter was last appended to its stream again.
ALTER TABLE dead_letters ADD COLUMN replayed_as text;

-- The Redis server that holds a partition's stock, as it was when that was last put there or found whole.
-- Another one, or the same after a restart, may lack what buyers were promised.
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
-- gen_random_uuid takes 122 bits of each from the server's strong source.
INSERT INTO receipt_key (secret) VALUES (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- +goose Down
DROP TABLE receipt_key, redis_servers, releases;
DROP FUNCTION pay_clock(), lost_time();
DROP TABLE outages, pulse;
ALTER TABLE dead_letters DROP COLUMN replayed_as;
ALTER TABLE sales DROP COLUMN last_sequence;
ALTER TABLE orders DROP COLUMN key_fingerprint, DROP COLUMN payment_reference, DROP COLUMN due;
