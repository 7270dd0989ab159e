-- +goose Up

-- A sale: its terms, its state and how much of it is sold.
CREATE TABLE sales (
    id                     uuid PRIMARY KEY,
    name                   text NOT NULL,
    stock                  bigint NOT NULL,
    -- Units of live orders (confirmed or paid): a projection of order_events.
    sold                   bigint NOT NULL DEFAULT 0,
    state                  text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'paused', 'ended')),
    per_order_limit        bigint NOT NULL DEFAULT 1 CHECK (per_order_limit > 0),
    opens_at               timestamptz,
    closes_at              timestamptz,
    payment_window_seconds bigint NOT NULL DEFAULT 0 CHECK (payment_window_seconds >= 0),
    -- 1, and one more for each rebuild of the sale's stock in Redis.
    epoch                  bigint NOT NULL DEFAULT 1,
    -- The sale lives in partition hash(id) mod partitions; shards is how many it spans.
    partitions             integer NOT NULL DEFAULT 1 CHECK (partitions > 0),
    shards                 integer NOT NULL DEFAULT 1 CHECK (shards > 0),
    -- The latest change of the definition, and the latest one that Redis has. Workers publish the rest.
    revision               bigint NOT NULL DEFAULT 1,
    published_revision     bigint NOT NULL DEFAULT 0,
    created_at             timestamptz NOT NULL DEFAULT now(),
    -- The second guard against overselling; the first is lua/reserve.lua.
    CONSTRAINT sales_not_oversold CHECK (sold BETWEEN 0 AND stock)
) WITH (fillfactor = 50); -- the counter of a hot sale is updated in place, so leave room on its page

CREATE INDEX sales_unpublished ON sales (id) WHERE published_revision < revision;

-- The log of a sale's definition: one row per revision.
CREATE TABLE sale_events (
    sale_id         uuid NOT NULL REFERENCES sales (id),
    revision        bigint NOT NULL,
    type            text NOT NULL,
    data            jsonb NOT NULL DEFAULT '{}',
    idempotency_key text,
    occurred_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sale_id, revision)
);

CREATE UNIQUE INDEX sale_events_idempotency ON sale_events (sale_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- The log of all orders: append only. orders and sales.sold can be rebuilt from it.
CREATE TABLE order_events (
    position    bigint GENERATED ALWAYS AS IDENTITY,
    order_id    uuid NOT NULL,
    version     integer NOT NULL CHECK (version > 0),
    type        text NOT NULL,
    sale_id     uuid NOT NULL,
    user_id     text NOT NULL,
    quantity    bigint NOT NULL CHECK (quantity > 0),
    occurred_at timestamptz NOT NULL,
    data        jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (order_id, version)
);

-- The current state of orders. No foreign key to sales: it would lock the hot row once per order, and
-- the ledger accepts an order only together with the update of that row.
CREATE TABLE orders (
    id          uuid PRIMARY KEY,
    sale_id     uuid NOT NULL,
    user_id     text NOT NULL,
    quantity    bigint NOT NULL CHECK (quantity > 0),
    status      text NOT NULL CHECK (status IN ('confirmed', 'paid', 'cancelled', 'expired', 'rejected', 'voided')),
    version     integer NOT NULL CHECK (version > 0),
    -- The order's place in its sale, and the epoch of the sale's stock in which it was assigned.
    sequence    bigint NOT NULL,
    epoch       bigint NOT NULL,
    reserved_at timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    reason      text
);

-- At most one live order per user and sale, even if Redis accepts more.
CREATE UNIQUE INDEX orders_one_live_per_user ON orders (sale_id, user_id) WHERE status IN ('confirmed', 'paid');

-- Stream entries that no worker can apply, kept whole: fields is [[name, value], …] in the order of
-- the entry, a value being {"text": …} or, where it is not UTF-8, {"base64": …}.
CREATE TABLE dead_letters (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream      text NOT NULL,
    entry_id    text NOT NULL,
    fields      jsonb NOT NULL,
    reason      text NOT NULL,
    deliveries  bigint NOT NULL,
    status      text NOT NULL DEFAULT 'parked' CHECK (status IN ('parked', 'replayed', 'discarded')),
    replays     integer NOT NULL DEFAULT 0,
    resolution  text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    UNIQUE (stream, entry_id)
);

-- +goose Down
DROP TABLE dead_letters, orders, order_events, sale_events, sales;
