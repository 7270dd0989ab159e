-- +goose Up
-- contract: it replaces what earlier programs call; for them both do what they did
CREATE TABLE IF NOT EXISTS schema_contracts (
    migration bigint PRIMARY KEY, works_from bigint NOT NULL, release text NOT NULL);
INSERT INTO schema_contracts (migration, works_from, release) VALUES (10, 1, 'v0.1.0');
SET LOCAL lock_timeout = '2s';

-- make_month finds names in its own schema, as in migration 00001.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The months: the sales from first to before until, and their tables. One of the tables is NULL if only the other one
-- is attached. A DEFAULT partition is no month.
CREATE OR REPLACE VIEW order_months AS
WITH parts AS (
    SELECT i.inhparent, i.inhrelid::regclass AS part,
           coalesce(substring(bound FROM 'FROM \(''([^'']*)''\)')::uuid, '00000000-0000-0000-0000-000000000000') AS first,
           coalesce(substring(bound FROM 'TO \(''([^'']*)''\)')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff') AS until
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid, pg_get_expr(c.relpartbound, c.oid) AS bound
    WHERE i.inhparent IN ('orders'::regclass, 'order_events'::regclass) AND NOT i.inhdetachpending AND bound <> 'DEFAULT'
)
SELECT first, until, o.part AS orders, e.part AS events
FROM (SELECT * FROM parts WHERE inhparent = 'orders'::regclass) AS o
FULL JOIN (SELECT * FROM parts WHERE inhparent = 'order_events'::regclass) AS e USING (first, until);

-- Makes sure that the orders of a sale have tables. It takes no lock that stops writers of orders, unless somebody has
-- added a DEFAULT partition: Postgres locks that and reads all of it. So a month whose orders are in one already, or
-- beside a large one, gets no table; its orders go there. SECURITY DEFINER, because ingresses and workers need not own
-- the tables.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION make_month(sale uuid) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    month timestamp := sale_month(sale);
    lowest uuid := first_sale(month);
    next uuid := first_sale(month + interval '1 month');
    patience text := current_setting('lock_timeout');
    parent text;
    part text;
    rest regclass;
    taken boolean;
    statement text;
BEGIN
    IF EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND orders IS NOT NULL AND events IS NOT NULL) THEN
        RETURN;
    END IF;
    LOCK TABLE ONLY order_events, ONLY orders IN SHARE UPDATE EXCLUSIVE MODE;
    FOREACH parent IN ARRAY '{order_events,orders}'::text[] LOOP
        CONTINUE WHEN EXISTS (SELECT FROM order_months WHERE sale >= first AND sale < until AND CASE parent WHEN 'orders' THEN orders ELSE events END IS NOT NULL);
        SELECT partdefid INTO rest FROM pg_partitioned_table WHERE partrelid = parent::regclass AND partdefid <> 0;
        IF rest IS NOT NULL THEN
            EXECUTE format('SELECT pg_relation_size(%L::regclass) > 16000000 OR EXISTS (SELECT FROM %s WHERE sale_id >= %L AND sale_id < %L)', rest, rest, lowest, next) INTO taken;
            CONTINUE WHEN taken;
            -- While it waits for that lock, new orders wait behind it.
            PERFORM set_config('lock_timeout', '1s', true);
        END IF;
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
        PERFORM set_config('lock_timeout', patience, true);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
CREATE OR REPLACE VIEW order_months AS
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
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION make_month(sale uuid) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
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
-- +goose StatementEnd
DELETE FROM schema_contracts WHERE migration = 10;
