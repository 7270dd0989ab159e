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
-- In a sale with a pace each order gets a turn to pay, at which its payment window begins: the earliest one ahead that is
-- free, else the next one after all turns of the sale. Turns are on the clock of deadlines, so that an outage
-- moves both: the turn of an order is its deadline less the window. pay_from is the turn as it is shown at first. The
-- transaction has locked the turns of the sale in a statement before (lock_turns.sql).
WITH event AS (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::text[], $9::text[])
        WITH ORDINALITY AS e (order_id, sale_id, user_id, quantity, sequence, epoch, reserved_at, key_fingerprint, lines, place)
), form AS MATERIALIZED (
    -- The lines that orders of a sale with items may have.
    SELECT id, '^([' || coalesce((SELECT string_agg(item, '') FROM sale_items WHERE sale_id = sales.id), '.') || '][0-9]+)+$' AS form
    FROM sales WHERE id = ANY ($2::uuid[]) AND items > 0
), new AS (
    -- The orders that need a turn.
    SELECT e.order_id, s.id AS sale_id, row_number() OVER (PARTITION BY s.id ORDER BY e.sequence, e.order_id) AS n
    FROM event AS e JOIN sales AS s ON s.id = e.sale_id AND s.epoch <= e.epoch
    WHERE s.payments_per_second > 0 AND $10::text IS NULL
      AND NOT EXISTS (SELECT FROM order_events AS known WHERE known.sale_id = e.sale_id AND known.order_id = e.order_id)
), paced AS MATERIALIZED (
    -- upto: the last free turn that these orders take, or NULL if they take all. next: the one after all turns of the sale;
    -- programs that write no row in pay_turns have given out some to unpaid orders.
    SELECT s.id, clock, step, upto,
           greatest(clock, (SELECT max(turn) FROM pay_turns WHERE sale_id = s.id) + step,
                    (SELECT max(due) FROM orders WHERE sale_id = s.id AND status = 'confirmed' AND due IS NOT NULL)
                        - make_interval(secs => s.payment_window_seconds) + step) AS next
    FROM (SELECT sale_id, count(*) AS orders FROM new GROUP BY sale_id) AS needed JOIN sales AS s ON s.id = needed.sale_id
    CROSS JOIN make_interval(secs => 1.0 / nullif(s.payments_per_second, 0)) AS step CROSS JOIN pay_clock() AS clock
    LEFT JOIN LATERAL (
        SELECT turn FROM pay_turns WHERE sale_id = s.id AND turn > clock AND free ORDER BY turn OFFSET needed.orders - 1 LIMIT 1
    ) AS f (upto) ON true
), taken AS (
    DELETE FROM pay_turns AS t USING paced AS p WHERE t.sale_id = p.id AND t.turn <= coalesce(p.upto, 'infinity') AND (t.free OR p.upto IS NULL)
    RETURNING t.sale_id, t.turn, t.free AND t.turn > p.clock AS ahead
), rest AS (
    SELECT *, (SELECT array_agg(turn ORDER BY turn) FROM taken WHERE sale_id = paced.id AND ahead) AS free FROM paced
), turn AS (
    SELECT order_id, sale_id, clock, coalesce(free[n::int], next + step * (n - 1 - coalesce(cardinality(free), 0))) AS turn
    FROM new JOIN rest ON id = sale_id
), entry AS (
    SELECT e.*, turn.turn, turn.turn + (SELECT lost_time()) AS pay_from, s.id IS NOT NULL AS sale_known, s.archived_at IS NOT NULL AS archived,
           NOT coalesce(e.lines ~ form.form, e.lines IS NULL AND form.form IS NULL) AND s.id IS NOT NULL AND $10::text IS NULL AS wrong_items,
           -- add_sold.sql checks that the epoch is still the same at the commit.
           e.epoch < s.epoch AND $10::text IS NULL AS late,
           -- The payment window begins now, not with the reservation: payments are impossible before.
           CASE WHEN s.payment_window_seconds > 0 THEN coalesce(turn.turn, (SELECT pay_clock())) + make_interval(secs => s.payment_window_seconds) END AS due
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
    ON CONFLICT (sale_id, user_id) WHERE is_live(status) DO NOTHING
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
), kept AS (
    INSERT INTO pay_turns (sale_id, turn, free)
    SELECT sale_id, max(turn), false FROM turn JOIN paced ON id = sale_id AND upto IS NULL GROUP BY sale_id
    UNION ALL
    -- Of orders that are not confirmed after all.
    SELECT sale_id, turn, true FROM turn WHERE order_id NOT IN (SELECT id FROM confirmed) AND turn > clock
    ON CONFLICT (sale_id, turn, free) DO NOTHING
)
SELECT entry.place,
       CASE WHEN decided.order_id IS NOT NULL THEN decided.status
            WHEN entry.archived THEN 'archived'
            WHEN entry.wrong_items THEN 'wrong-items'
            WHEN entry.sale_known OR $10::text IS NOT NULL THEN 'recorded'
            ELSE 'unknown-sale' END
FROM entry LEFT JOIN decided USING (order_id)
