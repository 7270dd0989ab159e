-- Writes the next event of orders that the transaction has locked, and their rows.
--
-- $1, $2  the orders as columns: id, the version that was read; all of the sale $7
-- $3      the status that they get
-- $4      the type of the event
-- $5      the references of their payments, or NULL
-- $6      true if their units are released: records that Redis has to release them, and the caller takes them
--         from the items and from sales.sold, last and sorted (record_orders.sql says why)
-- $8, $9  the reason and the name of the operator who cancels them, or NULL
--
-- The orders are found by the index, as in find_orders.sql, and updated by their places. The outer LIMIT
-- says that they are few.
--
-- Returns the number of changed orders, fewer than given if one was changed without a lock, or if the last event of one
-- has another version than its row: the next one would leave a gap in the log. And the time of the change.
WITH changed AS (
    UPDATE orders AS o
    SET status = $3, version = o.version + 1, updated_at = now(), payment_reference = coalesce(read.reference, o.payment_reference)
    FROM (
        SELECT read.version, read.reference, here.ctid, here.status FROM unnest($1::uuid[], $2::integer[], $5::text[]) AS read (id, version, reference)
        CROSS JOIN LATERAL (SELECT ctid, status FROM orders WHERE sale_id = $7 AND id = read.id LIMIT 1) AS here
        CROSS JOIN LATERAL (SELECT FROM order_events AS e WHERE e.sale_id = $7 AND e.order_id = read.id AND e.version = read.version LIMIT 1) AS logged
        LIMIT cardinality($1)
    ) AS read
    WHERE o.sale_id = $7 AND o.ctid = read.ctid AND o.version = read.version
    RETURNING o.id, o.version, o.sale_id, o.user_id, o.quantity, o.lines, o.due, o.pay_from, read.reference, read.status AS was
), logged AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, lines, occurred_at, data)
    SELECT id, version, $4, sale_id, user_id, quantity, lines, now(), jsonb_strip_nulls(jsonb_build_object('reference', reference, 'reason', $8::text, 'operator', $9::text))
    FROM changed
), released AS (
    INSERT INTO releases (order_id, sale_id, user_id, quantity)
    SELECT id, sale_id, user_id, quantity FROM changed WHERE $6
), freed AS (
    -- Whoever pays or leaves before the turn to pay leaves it to another order.
    INSERT INTO pay_turns (sale_id, turn, free)
    SELECT c.sale_id, turn, true
    FROM changed AS c JOIN sales AS s ON s.id = $7 CROSS JOIN LATERAL (SELECT c.due - make_interval(secs => s.payment_window_seconds)) AS had (turn)
    WHERE c.was = 'confirmed' AND c.pay_from IS NOT NULL AND turn > (SELECT pay_clock())
    ORDER BY turn
    ON CONFLICT (sale_id, turn, free) DO NOTHING
)
SELECT count(*), now() FROM changed
