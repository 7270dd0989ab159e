-- Records OrderReserved events together with their outcome. The events of refused orders are recorded as confirmed,
-- which log_refusals.sql corrects in the same transaction.
--
-- $1..$9  the events as columns, each order at most once: order, sale, user, quantity, sequence,
--         epoch, reserved at, fingerprint of the idempotency key or NULL, lines or NULL; the last array may be shorter, or NULL, for NULLs
-- $10     NULL to confirm where possible, or the reason for which all of them are rejected
--
-- Returns one row per event: its place in the arrays, counted from 1, and a word:
--   confirmed      recorded now, and the units are the buyer's
--   rejected       recorded now, and refused: $10, or the user has another live order in the sale
--   voided         recorded now, and void: the sale's stock was rebuilt without this order
--   recorded       an earlier delivery of the event was recorded; nothing was changed
--   unknown-sale   Postgres has no such sale; nothing was changed
--   wrong-items    the lines are not of the items of the sale; nothing was changed. The order may have been refused before
--   archived       the orders of the sale are in a file; nothing was changed
--
-- All transactions take locks in one order, so that workers with the same events wait for each other without a
-- deadlock: events by sale and order, then orders by sale and user, and the caller takes
-- the items of sales, and the sales last, by id.
--
-- So the event comes before the outcome is known. Who inserts it decides: another transaction with the same event
-- waits here until this one ends, and has locked none of the orders that both would insert.
--
-- In a sale with a pace each order gets a turn to pay (pay_from), the next one after the latest turn of the sale, and its
-- payment window begins then. The transaction has locked the turns of the sale in a statement before (lock_turns.sql).
WITH event AS (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::text[], $9::text[])
        WITH ORDINALITY AS e (order_id, sale_id, user_id, quantity, sequence, epoch, reserved_at, key_fingerprint, lines, place)
), form AS MATERIALIZED (
    -- The lines that orders of a sale with items may have.
    SELECT id, '^([' || coalesce((SELECT string_agg(item, '') FROM sale_items WHERE sale_id = sales.id), '.') || '][0-9]+)+$' AS form
    FROM sales WHERE id = ANY ($2::uuid[]) AND items > 0
), paced AS MATERIALIZED (
    SELECT id, epoch, step, greatest(now(), (SELECT max(pay_from) FROM orders WHERE sale_id = sales.id) + step) AS next
    FROM sales, make_interval(secs => 1.0 / nullif(payments_per_second, 0)) AS step
    WHERE id = ANY ($2::uuid[]) AND payments_per_second > 0
), turn AS (
    SELECT e.order_id, p.next + p.step * (row_number() OVER (PARTITION BY p.id ORDER BY e.sequence, e.order_id) - 1) AS pay_from
    FROM event AS e JOIN paced AS p ON p.id = e.sale_id AND p.epoch <= e.epoch
    WHERE $10::text IS NULL AND NOT EXISTS (SELECT FROM order_events AS known WHERE known.sale_id = e.sale_id AND known.order_id = e.order_id)
), entry AS (
    SELECT e.*, turn.pay_from, s.id IS NOT NULL AS sale_known, s.archived_at IS NOT NULL AS archived,
           NOT coalesce(e.lines ~ form.form, e.lines IS NULL AND form.form IS NULL) AND s.id IS NOT NULL AND $10::text IS NULL AS wrong_items,
           -- add_sold.sql checks that the epoch is still the same at the commit.
           e.epoch < s.epoch AND $10::text IS NULL AS late,
           -- The payment window begins now, not with the reservation: payments are impossible before.
           CASE WHEN s.payment_window_seconds > 0 THEN (SELECT pay_clock()) + coalesce(turn.pay_from - now(), '0') + make_interval(secs => s.payment_window_seconds) END AS due
    FROM event AS e LEFT JOIN sales AS s ON s.id = e.sale_id LEFT JOIN form ON form.id = e.sale_id LEFT JOIN turn USING (order_id)
), fresh AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch, due, pay_from, key_fingerprint, lines)
    SELECT order_id, 2, 'OrderConfirmed', sale_id, user_id, quantity, now(), reserved_at, sequence, epoch, due, pay_from, key_fingerprint, lines
    FROM entry
    -- Without its sale an order cannot be confirmed, but it can be rejected.
    WHERE (sale_known OR $10::text IS NOT NULL) AND NOT archived AND NOT wrong_items
    ORDER BY sale_id, order_id
    ON CONFLICT (sale_id, order_id, version) DO NOTHING
    RETURNING order_id
), confirmed AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, due, pay_from, key_fingerprint, lines)
    SELECT order_id, sale_id, user_id, quantity, 'confirmed', 2, sequence, epoch, reserved_at, now(), due, pay_from, key_fingerprint, lines
    FROM entry JOIN fresh USING (order_id)
    WHERE $10::text IS NULL AND late IS NOT TRUE
    -- Among several orders of one user the first in the sale wins.
    ORDER BY sale_id, user_id, sequence, order_id
    ON CONFLICT (sale_id, user_id) WHERE status IN ('confirmed', 'paid') DO NOTHING
    RETURNING id
), decided AS (
    SELECT entry.*,
           CASE WHEN confirmed.id IS NOT NULL THEN 'confirmed' WHEN late THEN 'voided' ELSE 'rejected' END AS status,
           CASE WHEN confirmed.id IS NOT NULL THEN NULL WHEN late THEN 'sale-rebuilt' ELSE coalesce($10::text, 'already-purchased') END AS reason
    FROM entry JOIN fresh USING (order_id) LEFT JOIN confirmed ON confirmed.id = entry.order_id
), refused AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, key_fingerprint, lines, reason)
    SELECT order_id, sale_id, user_id, quantity, status, 2, sequence, epoch, reserved_at, now(), key_fingerprint, lines, reason
    FROM decided WHERE status <> 'confirmed'
)
SELECT entry.place,
       CASE WHEN decided.order_id IS NOT NULL THEN decided.status
            WHEN entry.archived THEN 'archived'
            WHEN entry.wrong_items THEN 'wrong-items'
            WHEN entry.sale_known OR $10::text IS NOT NULL THEN 'recorded'
            ELSE 'unknown-sale' END
FROM entry LEFT JOIN decided USING (order_id)
