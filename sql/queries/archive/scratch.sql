-- Brings a file, which table.sql and header_rows.sql have, back into temporary tables with the names of the real ones, which
-- statements meet in their place until the end of the transaction. Columns that the file lacks get their defaults, and tables of
-- which it has nothing are empty. The log and the orders have no constraints, so that a lie gets so far that it is found. The
-- search path is set so that statements which the session has prepared are read again. The caller puts projection/replay.sql
-- where the braces are.
SELECT set_config('search_path', 'pg_temp, ' || current_setting('search_path'), true);
DO $$ DECLARE table_name text; columns text; BEGIN
    FOREACH table_name IN ARRAY '{sales,sale_items,sale_events,draws,draw_chunks,draw_ranks,draw_offers,releases,dead_letters,relay_targets}'::text[] LOOP
        EXECUTE format('CREATE TEMP TABLE %1$I (LIKE %1$I INCLUDING DEFAULTS INCLUDING INDEXES)', table_name);
        SELECT string_agg(quote_ident(key), ', ') INTO columns FROM (SELECT row FROM file_draw WHERE name = table_name LIMIT 1) AS one, jsonb_object_keys(row) AS key;
        IF columns IS NOT NULL THEN
            EXECUTE format('INSERT INTO %1$I (%2$s) SELECT %2$s FROM (SELECT row AS r FROM file_draw WHERE name = %1$L) AS own, jsonb_populate_record(NULL::%1$I, r)', table_name, columns);
        END IF;
    END LOOP;
END $$;
ALTER TABLE file_events RENAME TO order_events;
ALTER TABLE file_payments RENAME TO payment_events;
CREATE TEMP TABLE orders (LIKE orders INCLUDING DEFAULTS);
INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason, due, pay_from, payment_reference, key_fingerprint, lines)
SELECT id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason, due, pay_from, payment_reference, key_fingerprint, lines
FROM (
{{replay}}
) AS replayed WHERE (status, sequence, epoch, reserved_at) IS NOT NULL AND sale_id IN (SELECT id FROM sales);
CREATE TEMP VIEW open_payments AS
SELECT * FROM (SELECT DISTINCT ON (reference) *, open_payment(type) AS state FROM payment_events ORDER BY reference, version DESC) AS latest WHERE state IS NOT NULL;
-- The entries of a draw are in another file. They closed when it was published that they had.
INSERT INTO sales (id, name, stock, closes_at, archived_at)
SELECT entries_id, '', 0, (SELECT (data ->> 'closes_at')::timestamptz FROM sale_events AS e WHERE e.sale_id = d.sale_id AND type = 'DrawFrozen' ORDER BY revision LIMIT 1), now()
FROM draws AS d;
ANALYZE orders, order_events, payment_events
