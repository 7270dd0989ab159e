-- +goose Up
-- Sales that are over leave Redis when every order of them is final, and later Postgres, into a file for each.

-- The time from which Redis has no buyers of the sale any more, or loses them soon (the event SaleRetired).
ALTER TABLE sales ADD COLUMN retired_at timestamptz;
-- The file with the orders of the sale, if archived_at is set because of it: format, path, sha256, orders, events,
-- and deleted_at once the tables have none of them.
ALTER TABLE sales ADD COLUMN archive jsonb;
-- Workers look for these all the time.
CREATE INDEX sales_unretired ON sales (id) WHERE retired_at IS NULL AND archived_at IS NULL;

-- As in 00010, except that a sale which was archived by itself does not stand for its month.
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
    IF EXISTS (SELECT FROM sales WHERE id >= lowest AND id < next AND archived_at IS NOT NULL AND archive IS NULL) THEN
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
-- +goose StatementEnd

-- +goose Down
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
-- +goose StatementEnd
DROP INDEX sales_unretired;
ALTER TABLE sales DROP COLUMN archive, DROP COLUMN retired_at;
