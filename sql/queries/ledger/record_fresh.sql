-- Records OrderReserved events that are all new, as nearly every batch is, and confirms them. It is record_orders.sql
-- in two thirds of the time, because it checks nothing first: it fails if an order was recorded before, has an unknown
-- sale, an archived one, one with a pace or one of a later epoch, has lines that are not of its sale, or if its user has a live order in the sale.
-- After a failure record_orders.sql takes the batch.
--
-- $1..$9  the events as columns, each order at most once: order, sale, user, quantity, sequence,
--         epoch, reserved at, fingerprint of the idempotency key or NULL, lines or NULL; the last array may be shorter, or NULL, for NULLs
--
-- Fails with
--   unique_violation    an order was recorded before, or its user has another live order in the sale
--   check_violation     no partition of order_events: Postgres has no such sale, or one with a pace, of a later epoch or with other items
--   not_null_violation  the same, of a DEFAULT partition that somebody has added
--
-- An INSERT with ON CONFLICT searches the index first, locks every row and writes it to the WAL twice; this one does
-- not. Rows are locked in the same order as in record_orders.sql, and in the index of events those of a sale grow at their end.
WITH sale AS MATERIALIZED (
    SELECT id, epoch,
           -- The payment window begins now, not with the reservation: payments are impossible before.
           CASE WHEN payment_window_seconds > 0 THEN (SELECT pay_clock()) + make_interval(secs => payment_window_seconds) END AS due,
           -- The lines that its orders may have; NULL in a sale without items.
           CASE WHEN items > 0 THEN '^([' || coalesce((SELECT string_agg(item, '') FROM sale_items WHERE sale_id = sales.id), '.') || '][0-9]+)+$' END AS form
    FROM sales WHERE id = ANY ($2::uuid[]) AND archived_at IS NULL AND payments_per_second = 0
), entry AS MATERIALIZED (
    -- Without its sale, in a later epoch or with other items, an order has no sale_id, and no month. add_sold.sql checks that
    -- the epoch is still the same at the commit.
    SELECT e.order_id, sale.id AS sale_id, e.user_id, e.quantity, e.sequence, e.epoch, e.reserved_at, e.key_fingerprint, e.lines, sale.due
    FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::text[], $9::text[])
        AS e (order_id, sale_id, user_id, quantity, sequence, epoch, reserved_at, key_fingerprint, lines)
    LEFT JOIN sale ON sale.id = e.sale_id AND sale.epoch <= e.epoch AND coalesce(e.lines ~ sale.form, e.lines IS NULL AND sale.form IS NULL)
), logged AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch, due, key_fingerprint, lines)
    SELECT order_id, 2, 'OrderConfirmed', sale_id, user_id, quantity, now(), reserved_at, sequence, epoch, due, key_fingerprint, lines
    FROM entry
    ORDER BY sale_id, order_id
    RETURNING 1
)
INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due, key_fingerprint, lines)
SELECT order_id, sale_id, user_id, quantity, 'confirmed', 2, sequence, epoch, reserved_at, now(), due, key_fingerprint, lines
FROM entry
-- Events before orders, as in record_orders.sql.
WHERE (SELECT count(*) FROM logged) > 0
ORDER BY sale_id, user_id, sequence, order_id
