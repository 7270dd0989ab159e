-- Roles of Postgres, each with the rights that its processes need. Run it in the database and schema of Stampede, as a
-- superuser, before the first migration and again after each: a repeat gives the rights to new tables. The roles have
-- no password, so nobody can log in by one until ALTER ROLE … PASSWORD.
--
--   stampede_migrator  owns all: `migrate`, `sale archive`, `projections rebuild --archive`
--   stampede_ingress   `serve`
--   stampede_worker    `work`
--   stampede_relay     `relay run`
--   stampede_desk      `dashboard`, `top`, `doctor` and the other commands of operators
--   stampede_reader    exports and analytics: reads sales, orders, payments and their events
DO $$
DECLARE
    schema text := current_schema();
    given record;
BEGIN
    FOR given IN SELECT 'stampede_' || unnest('{migrator,ingress,worker,relay,desk,reader}'::text[]) AS role LOOP
        IF to_regrole(given.role) IS NULL THEN
            EXECUTE format('CREATE ROLE %I LOGIN', given.role);
        END IF;
        EXECUTE format('GRANT CONNECT, TEMPORARY ON DATABASE %I TO %I', current_database(), given.role);
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', schema, given.role);
        IF given.role <> 'stampede_migrator' THEN
            EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA %I FROM %I', schema, given.role);
        END IF;
    END LOOP;
    -- Databases from before PostgreSQL 15 let each role make objects in public, also such as functions of others find.
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', schema);
    EXECUTE format('GRANT CREATE ON SCHEMA %I TO stampede_migrator', schema);

    FOR given IN
        SELECT rights, target, 'stampede_' || unnest(string_to_array(roles, ' ')) AS role
        FROM (VALUES
            ('SELECT', 'ingress worker relay desk reader', 'goose_db_version schema_contracts sales sale_items sale_events order_events pulse outages'),
            ('SELECT', 'ingress worker relay desk reader', 'draws'),
            ('SELECT', 'ingress worker desk reader', 'draw_chunks draw_ranks draw_offers'),
            ('INSERT', 'ingress desk', 'draws'),
            ('SELECT, INSERT', 'ingress desk', 'draw_commitments'),
            ('UPDATE', 'ingress worker desk', 'draws'),
            ('INSERT, DELETE', 'worker', 'draw_chunks draw_ranks'),
            ('INSERT, UPDATE', 'worker', 'draw_offers'),
            ('SELECT, INSERT, UPDATE', 'ingress worker desk', 'offers_due'),
            ('DELETE', 'worker', 'offers_due'),
            ('SELECT', 'ingress worker desk reader', 'orders order_history order_months'),
            ('SELECT', 'ingress worker relay desk reader', 'payment_events payments open_payments'),
            ('INSERT', 'ingress worker desk', 'payment_events'),
            ('SELECT', 'ingress worker desk reader', 'archived_payments'),
            ('INSERT', 'ingress desk', 'sales sale_items'),
            ('UPDATE', 'ingress worker desk', 'sales sale_items orders'),
            ('SELECT, INSERT', 'ingress worker desk', 'pay_turns'),
            ('DELETE', 'worker desk', 'pay_turns'),
            -- The log stays as it is, but for what is added to its data.
            ('UPDATE (idempotency_key, data)', 'ingress worker desk', 'sale_events'),
            ('UPDATE (type, due, pay_from, data)', 'ingress worker desk', 'order_events'),
            ('INSERT', 'ingress worker desk', 'sale_events order_events releases'),
            ('INSERT', 'worker desk', 'orders'),
            ('DELETE', 'desk', 'orders'),
            ('SELECT, UPDATE, DELETE', 'worker desk', 'releases'),
            ('INSERT, UPDATE', 'ingress', 'pulse'),
            ('INSERT', 'ingress', 'outages'),
            ('SELECT', 'ingress', 'receipt_key'),
            ('SELECT, INSERT', 'ingress worker desk', 'redis_servers'),
            ('UPDATE', 'worker desk', 'redis_servers'),
            ('SELECT, INSERT, UPDATE', 'worker desk', 'dead_letters'),
            ('SELECT', 'worker desk', 'audits'),
            ('INSERT, DELETE', 'desk', 'audits'),
            ('SELECT, INSERT, UPDATE, DELETE', 'worker desk', 'rebuilds'),
            ('SELECT, UPDATE', 'relay', 'relay_targets'),
            ('SELECT, INSERT, UPDATE, DELETE', 'desk', 'relay_targets'),
            -- Without URLs and secrets; read with the newest position.
            ('SELECT (name, state, fence)', 'reader', 'relay_targets'),
            ('SELECT (name, state, position, delivered_at, retry_at)', 'worker', 'relay_targets'),
            ('SELECT', 'desk', 'order_events_position_seq')
        ) AS t (rights, roles, targets), unnest(string_to_array(targets, ' ')) AS target
        WHERE to_regclass(target) IS NOT NULL
        UNION ALL
        SELECT 'EXECUTE', 'FUNCTION ' || target, 'stampede_' || unnest(string_to_array(roles, ' '))
        FROM (VALUES
            ('ingress worker desk', 'make_month(uuid)'),
            ('ingress worker desk', 'next_position()'),
            ('relay desk reader', 'newest_position()')
        ) AS f (roles, target)
        WHERE to_regprocedure(target) IS NOT NULL
    LOOP
        EXECUTE format('GRANT %s ON %s TO %I', given.rights, given.target, given.role);
    END LOOP;
END
$$;
