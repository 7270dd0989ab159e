-- What Redis says, for the session of one audit: queries compare it with Postgres as a set.
--
-- How far the sales were in Postgres before Redis is looked at. Redis has to know at least what is published here.
CREATE TEMP TABLE audit_before AS SELECT id AS sale_id, epoch, published_revision FROM sales;

CREATE TEMP TABLE audit_sales (
    sale_id    uuid PRIMARY KEY,
    -- false if Redis has no such sale; what follows is NULL then.
    present    boolean NOT NULL,
    epoch      bigint,
    units      bigint, -- left
    stock      bigint,
    -- Its sequence: how many reservations the sale had when it was looked at. Later ones are left out of every comparison,
    -- unless the sale has not given out their places until latest either.
    places     bigint,
    -- The same, after the snapshot of Postgres was taken.
    latest     bigint,
    generation bigint,
    revision   bigint,
    -- The definition, with 0 for times that are not set.
    opens_at_ms bigint, closes_at_ms bigint, per_order_limit bigint, payment_window_s bigint, state text,
    -- No unit came back while the buyers were read: so the units left and those of the buyers are of one moment.
    still      boolean NOT NULL DEFAULT false
);

-- The hashes of buyers. A HSCAN may bring a buyer twice. Late: at a place that the sale had not given out when it was
-- looked at.
CREATE TEMP TABLE audit_scan (
    sale_id uuid, user_id text, order_id uuid, quantity bigint, sequence bigint, epoch bigint, reserved_at timestamptz, late boolean
);

-- The hashes of ended orders, NULL where a value cannot be read. A HSCAN may bring one twice.
CREATE TEMP TABLE audit_ended (sale_id uuid, name text NOT NULL, order_id uuid, quantity bigint, status text);

-- Orders that are on their way: their events wait in a stream, or in a dead letter for an operator's decision.
CREATE TEMP TABLE audit_waiting (order_id uuid NOT NULL, parked boolean NOT NULL);
