-- +goose Up
-- One list says what still needs a sale. A sale leaves Redis, and its orders leave Postgres, only if the list is empty.

-- What may still change of the sales from lowest to highest: it keeps them in Redis.
CREATE FUNCTION open_sales(lowest uuid, highest uuid) RETURNS TABLE (sale uuid, reason text) LANGUAGE sql STABLE AS $$
    SELECT id, 'it is not over' FROM sales
    WHERE id BETWEEN lowest AND highest AND state <> 'ended' AND (closes_at <= now()) IS NOT TRUE
UNION ALL
    SELECT id, 'Redis does not have its last change yet' FROM sales
    WHERE id BETWEEN lowest AND highest AND published_revision <> revision
UNION ALL
    (SELECT sale_id, format('the order %s awaits payment', id) FROM orders
     WHERE sale_id BETWEEN lowest AND highest AND status = 'confirmed' AND due IS NOT NULL LIMIT 1)
UNION ALL
    (SELECT sale_id, format('the units of the order %s are not released', order_id) FROM releases
     WHERE sale_id BETWEEN lowest AND highest LIMIT 1)
UNION ALL
    -- The metadata of an entry has its sale, and is stored in base64, because it is no text.
    (SELECT s.id, format('dead letter %s waits for a decision', d.id)
     FROM dead_letters AS d CROSS JOIN jsonb_path_query(d.fields, 'lax $[*][1].base64') AS field CROSS JOIN concat(field #>> '{}') AS base64
     JOIN sales AS s ON position(convert_to(s.id::text, 'UTF8')
         IN CASE WHEN base64 ~ '^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$' THEN decode(base64, 'base64') END) > 0
     WHERE d.status = 'parked' AND s.id BETWEEN lowest AND highest LIMIT 1)
$$;

-- What still needs the orders of the sales from lowest to highest: it keeps them in Postgres.
CREATE FUNCTION sales_in_use(lowest uuid, highest uuid) RETURNS TABLE (sale uuid, reason text) LANGUAGE sql STABLE AS $$
    SELECT sale, reason FROM open_sales(lowest, highest)
UNION ALL
    SELECT id, 'its buyers are still in Redis: a worker removes them when nothing of the sale is open, --retire-after after its end'
    -- An earlier version archived months with such sales, and then nothing removes them.
    FROM sales WHERE id BETWEEN lowest AND highest AND retired_at IS NULL AND archived_at IS NULL
UNION ALL
    SELECT last.sale_id, format('the target %s of the relay has not read it: it is at position %s, and the last event of the sale at %s',
                                t.name, t.position, last.position)
    FROM (
        SELECT * FROM (
            (SELECT sale_id, position FROM order_events WHERE sale_id BETWEEN lowest AND highest ORDER BY position DESC LIMIT 1)
            UNION
            (SELECT sale_id, position FROM sale_events WHERE sale_id BETWEEN lowest AND highest ORDER BY position DESC LIMIT 1)
        ) AS newest ORDER BY position DESC LIMIT 1
    ) AS last JOIN relay_targets AS t ON t.position < last.position
$$;

-- As in 00010, except that it asks that list. No program calls it.
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION archive_month(month date) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    lowest uuid;
    next uuid;
    highest uuid;
    in_use text;
BEGIN
    SELECT first, until INTO lowest, next FROM order_months WHERE first_sale(month) >= first AND first_sale(month) < until;
    IF next > first_sale(date_trunc('month', now() AT TIME ZONE 'UTC')) THEN
        RAISE EXCEPTION 'sales of this month can still be created';
    END IF;
    IF next IS NULL THEN
        lowest := first_sale(month);
        next := first_sale(month + interval '1 month');
    END IF;
    -- The sales are locked before they are looked at.
    PERFORM FROM sales WHERE id >= lowest AND id < next ORDER BY id FOR NO KEY UPDATE;
    -- The highest id before that of the next month.
    highest := rpad(lpad(to_hex(('x' || left(replace(next::text, '-', ''), 12))::bit(48)::bigint - 1), 12, '0'), 32, 'f')::uuid;
    SELECT format('the sale %s is still needed: %s', sale, reason) INTO in_use FROM sales_in_use(lowest, highest) LIMIT 1;
    IF in_use IS NOT NULL THEN
        RAISE EXCEPTION '%', in_use;
    END IF;
    UPDATE sales SET archived_at = now() WHERE id >= lowest AND id < next AND archived_at IS NULL;
    RETURN QUERY
    SELECT format('ALTER TABLE %s DETACH PARTITION %s %s', i.inhparent::regclass, i.inhrelid::regclass, CASE WHEN i.inhdetachpending THEN 'FINALIZE' ELSE 'CONCURRENTLY' END)
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent IN ('orders'::regclass, 'order_events'::regclass) AND strpos(pg_get_expr(c.relpartbound, c.oid), format('TO (%L)', next)) > 0;
END
$$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION archive_month(month date) RETURNS SETOF text LANGUAGE plpgsql AS $$
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
DROP FUNCTION sales_in_use(uuid, uuid), open_sales(uuid, uuid);
