-- +goose Up
-- orders and order_events are partitioned by the month in which the sale was created, which is in its id (UUIDv7). The
-- existing tables become the first partitions, for all sales until the month after the newest one, without copying.

-- The time from which the orders of the sale are archived: they are in no table that Stampede reads (archive_month).
ALTER TABLE sales ADD COLUMN archived_at timestamptz;
-- The last two bytes of a sale's id are those of its orders' ids, which find the sale.
CREATE INDEX sales_tag ON sales (right(id::text, 4));

-- The start of the month in which a sale was created, in UTC.
CREATE FUNCTION sale_month(sale uuid) RETURNS timestamp LANGUAGE sql IMMUTABLE AS
    $$SELECT date_trunc('month', to_timestamp(('x' || left(replace(sale::text, '-', ''), 12))::bit(48)::bigint / 1000.0) AT TIME ZONE 'UTC')$$;
-- The lowest id of a sale that was created in that month or later.
CREATE FUNCTION first_sale(month timestamp) RETURNS uuid LANGUAGE sql IMMUTABLE AS
    $$SELECT rpad(lpad(to_hex(least(extract(epoch FROM month) * 1000, 281474976710655)::bigint), 12, '0'), 32, '0')::uuid$$;

-- A view that reads a renamed table would show the first month only.
-- +goose StatementBegin
DO $$
DECLARE
    readers text := (
        SELECT string_agg(DISTINCT pg_describe_object('pg_class'::regclass, r.ev_class, 0), ', ')
        FROM pg_depend AS d JOIN pg_rewrite AS r ON r.oid = d.objid
        WHERE d.classid = 'pg_rewrite'::regclass AND d.refobjid IN ('orders'::regclass, 'order_events'::regclass)
          AND r.ev_class NOT IN ('orders'::regclass, 'order_events'::regclass, 'order_history'::regclass));
BEGIN
    IF readers IS NOT NULL THEN
        RAISE EXCEPTION '% must be dropped before this migration and created again after it', readers;
    END IF;
END
$$;
CREATE FUNCTION pg_temp.copy_rights(source regclass, target regclass) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        SELECT format('GRANT %s%s ON %s TO %s%s', privilege_type, ' (' || quote_ident(attname) || ')', target,
                      CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
        FROM (
            SELECT NULL AS attname, acl.* FROM pg_class, aclexplode(relacl) AS acl WHERE oid = source AND grantee <> relowner
            UNION ALL
            SELECT attname, acl.* FROM pg_attribute, aclexplode(attacl) AS acl WHERE attrelid = source
        ) AS rights
        UNION ALL
        SELECT format('ALTER TABLE %s OWNER TO %s', target, relowner::regrole) FROM pg_class WHERE oid = source AND relowner <> current_user::regrole
    LOOP
        EXECUTE statement;
    END LOOP;
END
$$;
-- +goose StatementEnd

ALTER TABLE orders RENAME TO orders_first;
ALTER TABLE order_events RENAME TO order_events_first;
ALTER SEQUENCE order_events_position_seq RENAME TO order_events_first_position_seq;
ALTER INDEX orders_due RENAME TO orders_first_due;
ALTER INDEX orders_ended RENAME TO orders_first_ended;
ALTER INDEX orders_ended_of_user RENAME TO orders_first_ended_of_user;
ALTER INDEX orders_paid RENAME TO orders_first_paid;
ALTER INDEX orders_one_live_per_user RENAME TO orders_first_one_live_per_user;
-- The key finds the orders of a sale, too.
DROP INDEX orders_live;
ALTER TABLE orders_first DROP CONSTRAINT orders_pkey, ADD CONSTRAINT orders_first_pkey PRIMARY KEY (sale_id, id);
ALTER TABLE order_events_first DROP CONSTRAINT order_events_pkey,
    ADD CONSTRAINT order_events_first_pkey PRIMARY KEY (sale_id, order_id, version);

CREATE TABLE orders (LIKE orders_first INCLUDING ALL EXCLUDING INDEXES) PARTITION BY RANGE (sale_id);
CREATE TABLE order_events (LIKE order_events_first INCLUDING ALL EXCLUDING INDEXES) PARTITION BY RANGE (sale_id);
SELECT pg_temp.copy_rights('orders_first', 'orders'), pg_temp.copy_rights('order_events_first', 'order_events');
SELECT setval('order_events_position_seq', last_value, is_called) FROM order_events_first_position_seq;
ALTER TABLE order_events_first ALTER COLUMN position DROP IDENTITY;
CREATE OR REPLACE VIEW order_history AS
SELECT position, order_id, 1 AS version, 'OrderReserved' AS type, sale_id, user_id, quantity, reserved_at AS occurred_at,
       data - '{reason,due}'::text[] AS data
FROM order_events
WHERE reserved_at IS NOT NULL
UNION ALL
SELECT position, order_id, version, type, sale_id, user_id, quantity, occurred_at,
       CASE version WHEN 2 THEN data - '{sequence,epoch,key_fingerprint}'::text[] ELSE data END
FROM order_events
WHERE type <> 'OrderReserved';

-- +goose StatementBegin
DO $$
DECLARE
    newest uuid := (SELECT id FROM (SELECT id FROM sales UNION ALL SELECT sale_id FROM order_events_first UNION ALL SELECT sale_id FROM orders_first) AS s
                    ORDER BY id DESC LIMIT 1);
    until uuid := first_sale(greatest(sale_month(newest) + interval '1 month', date_trunc('month', now() AT TIME ZONE 'UTC')));
BEGIN
    EXECUTE format('ALTER TABLE orders ATTACH PARTITION orders_first FOR VALUES FROM (MINVALUE) TO (%L)', until);
    EXECUTE format('ALTER TABLE order_events ATTACH PARTITION order_events_first FOR VALUES FROM (MINVALUE) TO (%L)', until);
END
$$;
-- +goose StatementEnd
-- These find the existing indexes of the first month.
ALTER TABLE orders ADD CONSTRAINT orders_pkey PRIMARY KEY (sale_id, id);
ALTER TABLE order_events ADD CONSTRAINT order_events_pkey PRIMARY KEY (sale_id, order_id, version);
CREATE UNIQUE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid');
CREATE INDEX orders_due ON orders (due) WHERE status = 'confirmed' AND due IS NOT NULL;
CREATE INDEX orders_paid ON orders (sale_id, quantity) WHERE status = 'paid';
CREATE INDEX orders_ended_of_user ON orders (user_id, id DESC) WHERE status NOT IN ('confirmed', 'paid');
CREATE INDEX orders_ended ON orders (sale_id, user_id, key_fingerprint, id DESC) INCLUDE (quantity, status)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> '';

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
    IF EXISTS (SELECT FROM sales WHERE id >= lowest AND id < next AND archived_at IS NOT NULL) THEN
        RAISE EXCEPTION 'the orders of sales of % are archived', to_char(month, 'YYYY-MM') USING ERRCODE = 'check_violation';
    END IF;
    LOCK TABLE ONLY order_events, ONLY orders IN SHARE UPDATE EXCLUSIVE MODE;
    FOREACH parent IN ARRAY '{order_events,orders}'::text[] LOOP
        CONTINUE WHEN EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND CASE parent WHEN 'orders' THEN orders ELSE events END IS NOT NULL);
        part := parent || to_char(month, '_YYYY_MM');
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL EXCLUDING IDENTITY EXCLUDING INDEXES)', part, parent);
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

-- Marks the sales of a month as archived, and returns the statements that detach their tables; a repeat returns those
-- that are left. It refuses while an order of the month may change.
CREATE FUNCTION archive_month(month date) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    lowest uuid;
    next uuid;
    left_over text;
BEGIN
    SELECT first, until INTO lowest, next FROM order_months WHERE first_sale(month) >= first AND first_sale(month) < until;
    IF next > first_sale(date_trunc('month', now() AT TIME ZONE 'UTC')) THEN
        RAISE EXCEPTION 'sales of this month can still be created';
    END IF;
    IF next IS NULL THEN
        lowest := first_sale(month);
        next := first_sale(month + interval '1 month');
    END IF;
    SELECT format('the sale %s is not over', id) INTO left_over
    FROM sales WHERE id >= lowest AND id < next AND state <> 'ended' AND (closes_at > now()) IS NOT FALSE LIMIT 1;
    IF left_over IS NULL THEN
        SELECT format('the order %s awaits payment', id) INTO left_over
        FROM orders WHERE sale_id >= lowest AND sale_id < next AND status = 'confirmed' AND due IS NOT NULL LIMIT 1;
    END IF;
    IF left_over IS NULL THEN
        SELECT format('the units of the order %s are not released', order_id) INTO left_over
        FROM releases WHERE sale_id >= lowest AND sale_id < next LIMIT 1;
    END IF;
    IF left_over IS NOT NULL THEN
        RAISE EXCEPTION '%', left_over;
    END IF;
    UPDATE sales SET archived_at = now() WHERE id >= lowest AND id < next AND archived_at IS NULL;
    RETURN QUERY
    SELECT format('ALTER TABLE %s DETACH PARTITION %s %s', i.inhparent::regclass, i.inhrelid::regclass, CASE WHEN i.inhdetachpending THEN 'FINALIZE' ELSE 'CONCURRENTLY' END)
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent IN ('orders'::regclass, 'order_events'::regclass) AND strpos(pg_get_expr(c.relpartbound, c.oid), format('TO (%L)', next)) > 0;
END
$$;
-- +goose StatementEnd
CREATE TRIGGER make_month BEFORE INSERT ON sales FOR EACH ROW EXECUTE FUNCTION make_month_of_sale();

-- The tables of this month and the next one.
SELECT make_month(first_sale(date_trunc('month', now() AT TIME ZONE 'UTC') + n * interval '1 month')) FROM generate_series(0, 1) AS n;

-- +goose Down
DROP TRIGGER make_month ON sales;
DROP FUNCTION archive_month(date), make_month_of_sale(), make_month(uuid);
DROP VIEW order_months;
DROP FUNCTION first_sale(timestamp), sale_month(uuid);
ALTER TABLE orders RENAME TO orders_by_month;
ALTER TABLE order_events RENAME TO order_events_by_month;
ALTER SEQUENCE order_events_position_seq RENAME TO order_events_by_month_position_seq;
CREATE TABLE orders (LIKE orders_by_month INCLUDING ALL EXCLUDING INDEXES);
CREATE TABLE order_events (LIKE order_events_by_month INCLUDING ALL EXCLUDING INDEXES);
INSERT INTO orders SELECT * FROM orders_by_month;
INSERT INTO order_events OVERRIDING SYSTEM VALUE SELECT * FROM order_events_by_month ORDER BY position;
SELECT setval('order_events_position_seq', last_value, is_called) FROM order_events_by_month_position_seq;
-- +goose StatementBegin
DO $$
DECLARE
    statement text;
BEGIN
    FOR statement IN
        SELECT format('GRANT %s%s ON %s TO %s%s', privilege_type, ' (' || quote_ident(attname) || ')', target,
                      CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
        FROM (VALUES ('orders_by_month'::regclass, 'orders'), ('order_events_by_month', 'order_events')) AS tables (source, target)
        CROSS JOIN LATERAL (
            SELECT NULL AS attname, acl.* FROM pg_class, aclexplode(relacl) AS acl WHERE oid = source AND grantee <> relowner
            UNION ALL
            SELECT attname, acl.* FROM pg_attribute, aclexplode(attacl) AS acl WHERE attrelid = source
        ) AS rights
    LOOP
        EXECUTE statement;
    END LOOP;
END
$$;
-- +goose StatementEnd
CREATE OR REPLACE VIEW order_history AS
SELECT position, order_id, 1 AS version, 'OrderReserved' AS type, sale_id, user_id, quantity, reserved_at AS occurred_at,
       data - '{reason,due}'::text[] AS data
FROM order_events
WHERE reserved_at IS NOT NULL
UNION ALL
SELECT position, order_id, version, type, sale_id, user_id, quantity, occurred_at,
       CASE version WHEN 2 THEN data - '{sequence,epoch,key_fingerprint}'::text[] ELSE data END
FROM order_events
WHERE type <> 'OrderReserved';
DROP TABLE orders_by_month, order_events_by_month;
ALTER TABLE orders ADD PRIMARY KEY (id);
ALTER TABLE order_events ADD PRIMARY KEY (order_id, version);
CREATE UNIQUE INDEX orders_one_live_per_user ON orders (user_id, sale_id) WHERE status IN ('confirmed', 'paid');
CREATE INDEX orders_due ON orders (due) WHERE status = 'confirmed' AND due IS NOT NULL;
CREATE INDEX orders_paid ON orders (sale_id, quantity) WHERE status = 'paid';
CREATE INDEX orders_ended_of_user ON orders (user_id, id DESC) WHERE status NOT IN ('confirmed', 'paid');
CREATE INDEX orders_live ON orders (sale_id) WHERE status IN ('confirmed', 'paid');
CREATE INDEX orders_ended ON orders (sale_id, user_id, key_fingerprint, id DESC) INCLUDE (quantity, status)
    WHERE status IN ('cancelled', 'expired', 'rejected') AND key_fingerprint <> '';
DROP INDEX sales_tag;
ALTER TABLE sales DROP COLUMN archived_at;
