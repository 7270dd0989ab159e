-- The data of Redis, for the session of one audit: queries compare it with Postgres as a set.
--
-- The published revisions before Redis is read. Redis must have at least these.
CREATE TEMP TABLE audit_before AS SELECT id AS sale_id, epoch, published_revision FROM sales;

CREATE TEMP TABLE audit_sales (
    sale_id   uuid PRIMARY KEY,
    shards    integer NOT NULL,
    -- How many items the sale has.
    items     integer NOT NULL,
    -- The server of one of its partitions did not answer, so nothing of the sale in Redis is known or compared.
    unread    boolean NOT NULL,
    -- Units that were given by one shard and not yet got by another, when the shards were read one after another:
    -- below 0 if units moved meanwhile. They are in no share.
    on_the_way bigint NOT NULL
);

-- The shards of each sale. A sale with one shard has number 0 only.
CREATE TEMP TABLE audit_shards (
    sale_id    uuid,
    shard      integer,
    -- Begins the findings about the shard; empty if the sale has no other.
    label      text NOT NULL,
    -- false if Redis has no such shard; what follows is NULL then.
    present    boolean NOT NULL,
    epoch      bigint,
    units      bigint, -- left
    stock      bigint, -- the shard's share
    -- Its sequence: the places up to it that are the shard's were given out when it was read. Comparisons leave out
    -- later ones, unless their places were still not assigned at latest.
    places     bigint,
    -- The same, after the snapshot of Postgres was taken.
    latest     bigint,
    generation bigint,
    revision   bigint,
    -- The definition, with 0 for times that are not set.
    opens_at_ms bigint, closes_at_ms bigint, per_order_limit bigint, payment_window_s bigint, state text,
    -- The limit of an order of a sale with items, whose per_order_limit is 0 in Redis: a version without items sells nothing.
    order_limit bigint,
    -- No unit returned while the buyers were read, so the units left and those of the buyers are of
    -- one moment.
    still      boolean NOT NULL DEFAULT false,
    PRIMARY KEY (sale_id, shard)
);

-- What each shard has of the items: left, its share of their stock, what other shards have given it and it has not got
-- yet (audit_sales.on_the_way), and their limit or 0.
CREATE TEMP TABLE audit_items (sale_id uuid, shard integer, item text COLLATE "C", units bigint, stock bigint, on_the_way bigint NOT NULL, per_order_limit bigint, PRIMARY KEY (sale_id, shard, item));

-- The hashes of buyers, each in a shard. HSCAN may return a buyer twice. Late: at a place that was not assigned when
-- the shard was read.
CREATE TEMP TABLE audit_scan (
    sale_id uuid, shard integer, user_id text, order_id uuid, quantity bigint, sequence bigint, epoch bigint, reserved_at timestamptz, key_fingerprint text, late boolean,
    -- Empty in a sale without items.
    lines text NOT NULL
);

-- The hashes of ended orders, NULL for unreadable values. HSCAN may return one twice.
CREATE TEMP TABLE audit_ended (sale_id uuid, name text NOT NULL, order_id uuid, quantity bigint, status text, lines text);

-- Orders in transit: their events wait in a stream, or in a dead letter for an operator's decision.
CREATE TEMP TABLE audit_waiting (order_id uuid NOT NULL, parked boolean NOT NULL);
