-- +goose Up

-- Functions that run with the rights of their owner (SECURITY DEFINER) look up names in their own schema, and last in
-- pg_temp, where each caller can make objects.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- Sales ---------------------------------------------------------------------------------------------------------------

-- A sale: its terms, its state and how much of it is sold.
CREATE TABLE sales (
    -- A UUIDv7. Its last two bytes are those of its orders' ids, too.
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
    -- How long after its deadline an order still takes money.
    payment_grace_seconds  bigint NOT NULL DEFAULT 0 CHECK (payment_grace_seconds >= 0),
    -- How many orders a second get their turn to pay; 0 for all at once.
    payments_per_second    bigint NOT NULL DEFAULT 0 CHECK (payments_per_second >= 0),
    -- What a unit costs, in minor units of the currency (ISO 4217); both or none. Items have prices of their own.
    unit_price             bigint CHECK (unit_price > 0),
    currency               char(3) CHECK (currency ~ '^[A-Z]{3}$'),
    -- 1, and one more for each rebuild of the sale's stock in Redis.
    epoch                  bigint NOT NULL DEFAULT 1,
    -- The highest place in the sale that a confirmed order has had. A Redis with a lower sequence lost orders.
    last_sequence          bigint NOT NULL DEFAULT 0,
    -- The sale lives in partition hash(id) mod partitions; shards is how many it spans.
    partitions             integer NOT NULL DEFAULT 1 CHECK (partitions > 0),
    shards                 integer NOT NULL DEFAULT 1 CHECK (shards > 0),
    -- How many items the sale has (sale_items): 0 for a sale of one thing.
    items                  integer NOT NULL DEFAULT 0 CHECK (items BETWEEN 0 AND 52),
    -- The latest change of the definition, and the latest one that Redis has. Workers publish the rest.
    revision               bigint NOT NULL DEFAULT 1,
    published_revision     bigint NOT NULL DEFAULT 0,
    -- The idempotency key of the request that created the sale, by which a retry is recognized.
    idempotency_key        text,
    created_at             timestamptz NOT NULL DEFAULT now(),
    -- The time from which Redis has no buyers of the sale any more, or loses them soon (the event SaleRetired).
    retired_at             timestamptz,
    -- The time from which the orders of the sale are in a file, and the file: format, path, sha256, orders, events, and
    -- deleted_at once the tables have none of them.
    archived_at            timestamptz,
    archive                jsonb,
    -- The second guard against overselling; the first is lua/reserve.lua.
    CONSTRAINT sales_not_oversold CHECK (sold BETWEEN 0 AND stock),
    CONSTRAINT sales_price CHECK ((unit_price IS NULL) = (currency IS NULL) OR items > 0 AND unit_price IS NULL)
) WITH (fillfactor = 50); -- the counter of a hot sale is updated in place, so leave room on its page

CREATE UNIQUE INDEX sales_idempotency ON sales (idempotency_key) WHERE idempotency_key IS NOT NULL;
-- The sale of an order.
CREATE INDEX sales_tag ON sales (right(id::text, 4));
-- Workers look for these two all the time.
CREATE INDEX sales_unpublished ON sales (id) WHERE published_revision < revision;
CREATE INDEX sales_unretired ON sales (id) WHERE retired_at IS NULL;

-- The items of a sale. All who lock rows of both lock the items first.
CREATE TABLE sale_items (
    sale_id         uuid NOT NULL REFERENCES sales ON DELETE CASCADE,
    -- The letter of the item in the lines of orders: a to z, then A to Z.
    item            text COLLATE "C" NOT NULL CHECK (item ~ '^[a-zA-Z]$'),
    code            text COLLATE "C" NOT NULL CHECK (code ~ '^[a-z0-9._-]{1,32}$'),
    name            text NOT NULL,
    unit_price      bigint CHECK (unit_price > 0),
    per_order_limit bigint CHECK (per_order_limit > 0),
    stock           bigint NOT NULL,
    -- Units of live orders: a projection of order_events, as sales.sold is for all items.
    sold            bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (sale_id, item),
    CONSTRAINT sale_items_code UNIQUE (sale_id, code),
    CONSTRAINT sale_items_not_oversold CHECK (sold BETWEEN 0 AND stock)
) WITH (fillfactor = 50);

-- The items of a sale in their order, as JSON; NULL if it has none.
CREATE FUNCTION items_of(sale uuid) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object('code', code, 'name', name, 'stock', stock, 'sold', sold, 'unit_price', unit_price,
                                                          'per_order_limit', per_order_limit)) ORDER BY item < 'a', item)
    FROM sale_items WHERE sale_id = sale
$$;

-- The lines of an order ("a2c1"), a row for each. No line has more than seven digits: forged ones must not stop an audit.
CREATE FUNCTION order_lines(lines text) RETURNS TABLE (item text, units bigint) LANGUAGE sql IMMUTABLE AS $$
    SELECT line[1], line[2]::bigint FROM regexp_matches(lines, '([a-zA-Z])([0-9]{1,7})', 'g') AS line
$$;

-- The items of an order by code, as a JSON object; NULL without lines.
CREATE FUNCTION order_items(sale uuid, lines text) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN lines IS NOT NULL THEN (
        SELECT '{' || string_agg(to_json(coalesce(i.code, l.item))::text || ':' || l.units, ',' ORDER BY l.item < 'a', l.item) || '}'
        FROM order_lines(lines) AS l LEFT JOIN sale_items AS i ON i.sale_id = sale AND i.item = l.item
    ) END
$$;

-- What an order costs; NULL if its sale has no price.
CREATE FUNCTION order_amount(sale uuid, unit_price bigint, quantity bigint, lines text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN lines IS NULL THEN unit_price * quantity ELSE (
        SELECT sum(i.unit_price * l.units)::bigint
        FROM order_lines(lines) AS l JOIN sale_items AS i ON i.sale_id = sale AND i.item = l.item
    ) END
$$;

-- Orders --------------------------------------------------------------------------------------------------------------

-- The log of all orders: append only. orders and sales.sold can be rebuilt from it. The first row of an order is its
-- outcome: OrderConfirmed, OrderRejected or OrderVoided. It has version 2 and both times: reserved_at is Redis's clock
-- at the reservation, occurred_at the decision of Postgres. Later rows have no reserved_at.
CREATE TABLE order_events (
    position    bigint GENERATED ALWAYS AS IDENTITY,
    order_id    uuid NOT NULL,
    version     integer NOT NULL CHECK (version > 1),
    type        text NOT NULL,
    sale_id     uuid NOT NULL,
    user_id     text NOT NULL,
    quantity    bigint NOT NULL CHECK (quantity > 0),
    occurred_at timestamptz NOT NULL,
    -- Only of the first row, version 2, which holds the reservation and its outcome. The meaning is that in orders.
    reserved_at timestamptz,
    sequence    bigint,
    epoch       bigint,
    due         timestamptz,
    pay_from    timestamptz,
    key_fingerprint text,
    -- The units by item ("a2c1"), of each event; NULL in a sale without items. The quantity is their sum.
    lines       text,
    -- What few events have: reason, reference, operator, traceparent.
    data        jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (sale_id, order_id, version)
) PARTITION BY RANGE (sale_id);

-- The relay reads the events of all months in this order.
CREATE INDEX order_events_position ON order_events (position);

-- The current state of orders. No foreign key to sales: it would lock the hot row once per order, and
-- the ledger accepts an order only together with the update of that row.
CREATE TABLE orders (
    id                uuid NOT NULL,
    sale_id           uuid NOT NULL,
    -- In the order of bytes, in which those that begin alike are together: the indexes find users by a beginning.
    user_id           text COLLATE "C" NOT NULL,
    quantity          bigint NOT NULL CHECK (quantity > 0),
    status            text NOT NULL CHECK (status IN ('confirmed', 'paid', 'cancelled', 'expired', 'rejected', 'voided')),
    version           integer NOT NULL CHECK (version > 0),
    -- The order's place in its sale, and the epoch of the sale's stock in which it was assigned.
    sequence          bigint NOT NULL,
    epoch             bigint NOT NULL,
    reserved_at       timestamptz NOT NULL,
    updated_at        timestamptz NOT NULL,
    -- The payment deadline of a confirmed order, on the clock pay_clock(); NULL if its sale has no payment window.
    due               timestamptz,
    -- The order's turn to pay, from which its payment window counts; NULL if its sale has no pace.
    pay_from          timestamptz,
    reason            text,
    -- The payment provider's reference for the payment of a paid order.
    payment_reference text,
    -- Fingerprint of the purchase's idempotency key, by which a rebuilt Redis recognizes a retry.
    key_fingerprint   text,
    -- The units by item ("a2c1"); NULL in a sale without items.
    lines             text,
    PRIMARY KEY (sale_id, id)
) PARTITION BY RANGE (sale_id);

-- At most one live order per user and sale, even if Redis accepts more. The user comes first, so that the index also
-- finds a buyer's live orders: a new order has no entry in the next index.
CREATE UNIQUE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid');
-- A buyer's ended orders, newest first: ids are in the order of creation.
CREATE INDEX orders_ended_of_user ON orders (user_id, id DESC) WHERE status NOT IN ('confirmed', 'paid');
-- The next payment deadlines of each sale.
CREATE INDEX orders_due ON orders (sale_id, due) WHERE status = 'confirmed' AND due IS NOT NULL;
-- The latest turn of a sale: the next one follows it.
CREATE INDEX orders_turns ON orders (sale_id, pay_from) WHERE pay_from IS NOT NULL;
-- The paid units of a sale: all payments would have to lock a counter. The quantity is a key column and not only
-- included: equal entries are then deduplicated, and the index of a large sale is so small that Postgres counts with it.
CREATE INDEX orders_paid ON orders (sale_id, quantity) WHERE status = 'paid';
-- The ended orders that a rebuilt Redis must know (ended_orders.sql). Live orders have no entry.
CREATE INDEX orders_ended ON orders (sale_id, user_id, key_fingerprint, id DESC) INCLUDE (quantity, status)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> '';

-- The log with a row for each event. The reservation has the position of its outcome.
CREATE VIEW order_history AS
SELECT position, order_id, 1 AS version, 'OrderReserved' AS type, sale_id, user_id, quantity, reserved_at AS occurred_at,
       data - 'reason' || jsonb_strip_nulls(jsonb_build_object('sequence', sequence, 'epoch', epoch, 'key_fingerprint', key_fingerprint, 'lines', lines)) AS data
FROM order_events
WHERE reserved_at IS NOT NULL
UNION ALL
SELECT position, order_id, version, type, sale_id, user_id, quantity, occurred_at,
       data || jsonb_strip_nulls(jsonb_build_object('due', due, 'pay_from', pay_from))
FROM order_events
WHERE type <> 'OrderReserved';

-- Months --------------------------------------------------------------------------------------------------------------

-- orders and order_events are partitioned by the month in which the sale was created, which is in its id.

-- The start of the month in which a sale was created, in UTC.
CREATE FUNCTION sale_month(sale uuid) RETURNS timestamp LANGUAGE sql IMMUTABLE AS
    $$SELECT date_trunc('month', to_timestamp(('x' || left(replace(sale::text, '-', ''), 12))::bit(48)::bigint / 1000.0) AT TIME ZONE 'UTC')$$;
-- The lowest id of a sale that was created in that month or later.
CREATE FUNCTION first_sale(month timestamp) RETURNS uuid LANGUAGE sql IMMUTABLE AS
    $$SELECT rpad(lpad(to_hex(least(extract(epoch FROM month) * 1000, 281474976710655)::bigint), 12, '0'), 32, '0')::uuid$$;

-- The months: the sales from first to before until, and their tables. One of the tables is NULL if only the other one
-- is attached.
CREATE VIEW order_months AS
WITH parts AS (
    SELECT i.inhparent, i.inhrelid::regclass AS part,
           coalesce(substring(bound FROM 'FROM \(''([^'']*)''\)')::uuid, '00000000-0000-0000-0000-000000000000') AS first,
           coalesce(substring(bound FROM 'TO \(''([^'']*)''\)')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS until
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid, pg_get_expr(c.relpartbound, c.oid) AS bound
    WHERE i.inhparent IN ('orders'::regclass, 'order_events'::regclass) AND NOT i.inhdetachpending
)
SELECT first, until, o.part AS orders, e.part AS events
FROM (SELECT * FROM parts WHERE inhparent = 'orders'::regclass) AS o
FULL JOIN (SELECT * FROM parts WHERE inhparent = 'order_events'::regclass) AS e USING (first, until);

-- Makes sure that the orders of a sale have tables. It takes no lock that stops writers of orders. SECURITY DEFINER,
-- because ingresses and workers need not own the tables.
-- +goose StatementBegin
CREATE FUNCTION make_month(sale uuid) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    month timestamp := sale_month(sale);
    lowest uuid := first_sale(month);
    next uuid := first_sale(month + interval '1 month');
    parent text;
    part text;
    statement text;
BEGIN
    IF EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND orders IS NOT NULL AND events IS NOT NULL) THEN
        RETURN;
    END IF;
    LOCK TABLE ONLY order_events, ONLY orders IN SHARE UPDATE EXCLUSIVE MODE;
    FOREACH parent IN ARRAY '{order_events,orders}'::text[] LOOP
        CONTINUE WHEN EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND CASE parent WHEN 'orders' THEN orders ELSE events END IS NOT NULL);
        part := parent || to_char(month, '_YYYY_MM');
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL EXCLUDING IDENTITY EXCLUDING INDEXES)', part, parent);
        -- The indexes get the names of those of the parent, with the month.
        FOR statement IN
            SELECT CASE c.contype WHEN 'p' THEN format('ALTER TABLE %I ADD CONSTRAINT %I %s', part, name, pg_get_constraintdef(c.oid))
                   ELSE format('CREATE %sINDEX %I ON %I%s', CASE WHEN indisunique THEN 'UNIQUE ' END, name, part, substr(def, strpos(def, ' USING '))) END
            FROM pg_index AS i JOIN pg_class AS r ON r.oid = i.indexrelid LEFT JOIN pg_constraint AS c ON c.conindid = i.indexrelid AND c.conrelid = i.indrelid,
                 pg_get_indexdef(i.indexrelid) AS def, concat(part, '_', replace(r.relname, parent || '_', '')) AS name
            WHERE i.indrelid = parent::regclass
        LOOP
            EXECUTE statement;
        END LOOP;
        EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, part, lowest, next);
    END LOOP;
END
$$;
-- No sale exists without tables for its orders.
CREATE FUNCTION make_month_of_sale() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM make_month(NEW.id);
    RETURN NEW;
END
$$;
-- +goose StatementEnd
CREATE TRIGGER make_month BEFORE INSERT ON sales FOR EACH ROW EXECUTE FUNCTION make_month_of_sale();

-- The tables of this month and the next one.
SELECT make_month(first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + n * interval '1 month')) FROM generate_series(0, 1) AS n;

-- Events of sales -----------------------------------------------------------------------------------------------------

-- Events of sales, orders and payments share one order of positions. SECURITY DEFINER, because an identity column needs no right
-- to its sequence, and a default does.
-- +goose StatementBegin
CREATE FUNCTION next_position() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN nextval('order_events_position_seq');
END
$$;
-- The newest position that was given to an event, or 0. It is not settled: its transaction may still run.
CREATE FUNCTION newest_position() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM order_events_position_seq);
END
$$;
-- +goose StatementEnd

-- The log of a sale's definition: one row per revision.
CREATE TABLE sale_events (
    sale_id         uuid NOT NULL REFERENCES sales (id),
    revision        bigint NOT NULL,
    position        bigint NOT NULL DEFAULT next_position() CONSTRAINT sale_events_position UNIQUE,
    type            text NOT NULL,
    data            jsonb NOT NULL DEFAULT '{}',
    idempotency_key text,
    -- Who made the change: the name of an operator, or NULL where Stampede did it by itself.
    operator        text,
    occurred_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sale_id, revision)
);

CREATE UNIQUE INDEX sale_events_idempotency ON sale_events (sale_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- Money ---------------------------------------------------------------------------------------------------------------

-- The log of the money that Stampede was told of: append only. The first row of a payment is its report
-- (PaymentReceived). What became of it follows: PaymentSettled, PaymentRefundDue, PaymentRefunded.
CREATE TABLE payment_events (
    -- The payment provider's reference. One that a buyer has given is kept as ORDER:REFERENCE.
    reference   text COLLATE "C" NOT NULL,
    version     integer NOT NULL CHECK (version > 0),
    position    bigint NOT NULL DEFAULT next_position() CONSTRAINT payment_events_position UNIQUE,
    type        text NOT NULL CHECK (type IN ('PaymentReceived', 'PaymentSettled', 'PaymentRefundDue', 'PaymentRefunded')),
    -- The order that the money is for; NULL if the report names none.
    order_id    uuid,
    -- The sale of the order; NULL while the order is not known.
    sale_id     uuid,
    -- Minor units; NULL if the report has no amount.
    amount      bigint CHECK (amount > 0),
    currency    char(3),
    -- Why a refund is due.
    reason      text,
    occurred_at timestamptz NOT NULL DEFAULT now(),
    -- What few events have: operator, refund_reference, and what a report said that cannot be kept in a column.
    data        jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (reference, version)
);

CREATE INDEX payment_events_of_order ON payment_events (order_id);
CREATE INDEX payment_events_of_sale ON payment_events (sale_id);
-- Payments that may wait for their order, and refunds that may be due: those without a later row.
CREATE INDEX payment_events_waiting ON payment_events (position) WHERE type = 'PaymentReceived' AND sale_id IS NULL;
CREATE INDEX payment_events_refund_due ON payment_events (position) WHERE type = 'PaymentRefundDue';

-- The present state of each payment.
CREATE VIEW payments AS
SELECT e.reference, e.version, e.position, e.order_id, e.sale_id, e.amount, e.currency,
       CASE e.type WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentSettled' THEN 'settled'
                   WHEN 'PaymentRefundDue' THEN 'refund_due' ELSE 'refunded' END AS state,
       e.reason, (SELECT occurred_at FROM payment_events AS first WHERE first.reference = e.reference AND first.version = 1) AS received_at,
       e.occurred_at AS updated_at, e.data
FROM payment_events AS e
WHERE NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1);

-- The relay -----------------------------------------------------------------------------------------------------------

-- The receivers of events. Every change by an operator changes the fence, which stops the process that delivers.
CREATE TABLE relay_targets (
    name          text PRIMARY KEY,
    url           text NOT NULL,
    -- disabled: the receiver has answered that it wants no more events.
    state         text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused', 'disabled')),
    -- All events up to and including this position are delivered.
    position      bigint NOT NULL CHECK (position >= 0),
    -- The delivery that may move the position: a process that was replaced has another number.
    fence         bigint NOT NULL DEFAULT 0,
    -- The process that delivers, for people who look.
    holder        text,
    -- The newest secret comes first. All of them sign.
    secrets       bytea[] NOT NULL DEFAULT '{}',
    allow_private boolean NOT NULL DEFAULT false,
    -- Failures in a row since the last success, the last of them, and the time before which nothing is sent.
    failures      integer NOT NULL DEFAULT 0 CHECK (failures >= 0),
    last_error    text,
    last_error_at timestamptz,
    retry_at      timestamptz,
    delivered_at  timestamptz,
    created_at    timestamptz NOT NULL DEFAULT now()
);

-- Redis ---------------------------------------------------------------------------------------------------------------

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

-- Stream entries that no worker can apply, kept whole: fields is [[name, value], …] in the order of the entry, a value
-- being {"text": …} or, where it is not UTF-8, {"base64": …}. An entry holds many orders. One of them that cannot be
-- applied becomes a dead letter of its own: order_id names it, and fields are those of an entry with this order only.
CREATE TABLE dead_letters (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream      text NOT NULL,
    entry_id    text NOT NULL,
    -- NULL for a whole entry, which cannot be read.
    order_id    uuid,
    fields      jsonb NOT NULL,
    reason      text NOT NULL,
    deliveries  bigint NOT NULL,
    status      text NOT NULL DEFAULT 'parked' CHECK (status IN ('parked', 'replayed', 'discarded')),
    replays     integer NOT NULL DEFAULT 0,
    -- The stream entry of the last replay.
    replayed_as text,
    resolution  text,
    -- Who replayed or discarded it last.
    operator    text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT dead_letters_once UNIQUE NULLS NOT DISTINCT (stream, entry_id, order_id)
);

-- The Redis server that holds a partition's stock, as last verified. Another server, or this one after a
-- restart, may lack accepted orders.
CREATE TABLE redis_servers (
    partition      integer PRIMARY KEY,
    run_id         text NOT NULL,
    replication_id text NOT NULL,
    vouched_at     timestamptz NOT NULL DEFAULT now()
);

-- Rebuilds of stock in Redis that are under way, for who watches them: nothing decides by this table. The process that
-- rebuilds writes its row about every second, and deletes it at the end. The row of a process that died stays, with an
-- old beat_at, until another rebuild removes it.
CREATE TABLE rebuilds (
    id          uuid PRIMARY KEY,
    partition   integer NOT NULL,
    -- NULL for all sales of the partition.
    sale_id     uuid,
    reason      text NOT NULL,
    -- The host and the process that rebuilds.
    process     text NOT NULL,
    began_at    timestamptz NOT NULL,
    beat_at     timestamptz NOT NULL DEFAULT now(),
    step        text NOT NULL,
    sales_done  integer NOT NULL,
    -- 0 before the sales are counted.
    sales_total integer NOT NULL
);

-- The clock of deadlines ----------------------------------------------------------------------------------------------

-- It is continuous when the clock of Postgres is set, forward or back (decision 9).

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
    -- The clock was set back, from ended_at to began_at: that much less time is lost.
    back     boolean NOT NULL DEFAULT false,
    PRIMARY KEY (began_at, ended_at)
);

-- pulse.lost, also while its row is missing.
CREATE FUNCTION lost_time() RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT lost FROM pulse), (SELECT sum(CASE WHEN back THEN began_at - ended_at ELSE ended_at - began_at END) FROM outages), '0')
$$;

-- It stands still during outages, so it is behind now() by their sum: an outage postpones all deadlines with one write.
-- After a move of the clock it stands still, until the next heartbeat adds the move to the lost time.
CREATE FUNCTION pay_clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT CASE WHEN now() - seen_at NOT BETWEEN -outage_after AND outage_after THEN seen_at END FROM pulse), now()) - lost_time()
$$;

-- What still needs a sale ---------------------------------------------------------------------------------------------

-- A sale leaves Redis, and its orders leave Postgres, only if its list here is empty.

-- What may still change of a sale: it keeps it in Redis.
CREATE FUNCTION open_sale(sale uuid) RETURNS TABLE (reason text) LANGUAGE sql STABLE AS $$
    SELECT 'it is not over' FROM sales WHERE id = sale AND state <> 'ended' AND (closes_at <= now()) IS NOT TRUE
UNION ALL
    SELECT 'Redis does not have its last change yet' FROM sales WHERE id = sale AND published_revision <> revision
UNION ALL
    (SELECT format('the order %s awaits payment', id) FROM orders WHERE sale_id = sale AND status = 'confirmed' AND due IS NOT NULL LIMIT 1)
UNION ALL
    (SELECT format('the units of the order %s are not released', order_id) FROM releases WHERE sale_id = sale LIMIT 1)
UNION ALL
    -- The metadata of an entry has its sale, and is stored in base64, because it is no text.
    (SELECT format('dead letter %s waits for a decision', d.id)
     FROM dead_letters AS d CROSS JOIN jsonb_path_query(d.fields, 'lax $[*][1].base64') AS field CROSS JOIN concat(field #>> '{}') AS base64
     WHERE d.status = 'parked' AND position(convert_to(sale::text, 'UTF8')
         IN CASE WHEN base64 ~ '^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$' THEN decode(base64, 'base64') END) > 0 LIMIT 1)
$$;

-- What still needs the orders of a sale: it keeps them in Postgres.
CREATE FUNCTION sale_in_use(sale uuid) RETURNS TABLE (reason text) LANGUAGE sql STABLE AS $$
    SELECT reason FROM open_sale(sale)
UNION ALL
    SELECT 'its buyers are still in Redis: a worker removes them when nothing of the sale is open, --retire-after after its end'
    FROM sales WHERE id = sale AND retired_at IS NULL
UNION ALL
    (SELECT format('the payment %s is due for refund', reference) FROM payments WHERE sale_id = sale AND state = 'refund_due' LIMIT 1)
UNION ALL
    SELECT format('the target %s of the relay has not read it: it is at position %s, and the last event of the sale at %s',
                  t.name, t.position, last.position)
    FROM (SELECT greatest((SELECT max(position) FROM order_events WHERE sale_id = sale),
                          (SELECT max(position) FROM sale_events WHERE sale_id = sale),
                          (SELECT max(position) FROM payment_events WHERE sale_id = sale)) AS position) AS last
    JOIN relay_targets AS t ON t.position < last.position
$$;

-- Receipts and audits -------------------------------------------------------------------------------------------------

-- The key with which all ingresses sign receipts: one row.
CREATE TABLE receipt_key (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    secret  bytea NOT NULL CHECK (octet_length(secret) >= 32)
);
-- Each gen_random_uuid has 122 random bits from the server's strong source.
INSERT INTO receipt_key (secret) VALUES (decode(replace(gen_random_uuid()::text || gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- The verdicts of whole audits. Workers show the newest one, and alerts tell when it is old or a promise is broken.
CREATE TABLE audits (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT now(),
    operator   text,
    -- Names of promises, such as S4.
    broken     text[] NOT NULL,
    unchecked  text[] NOT NULL
);

-- Rights --------------------------------------------------------------------------------------------------------------

-- Only roles may call a function with the rights of its owner that have the right whose use needs it
-- (deploy/acl/postgres.sql).
REVOKE EXECUTE ON FUNCTION make_month(uuid), next_position(), newest_position() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_month(uuid), next_position() TO pg_write_all_data;
GRANT EXECUTE ON FUNCTION newest_position() TO pg_read_all_data;

-- +goose Down
DROP VIEW order_history, order_months, payments;
DROP TABLE audits, payment_events, receipt_key, outages, pulse, rebuilds, redis_servers, dead_letters, releases, relay_targets, sale_events, orders, order_events, sale_items, sales;
DROP FUNCTION items_of(uuid), order_amount(uuid, bigint, bigint, text), order_items(uuid, text), order_lines(text), sale_in_use(uuid), open_sale(uuid), pay_clock(), lost_time(), newest_position(), next_position(),
    make_month_of_sale(), make_month(uuid), first_sale(timestamp), sale_month(uuid);
