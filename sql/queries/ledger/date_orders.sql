-- Gives at most $1 orders the deadline that the worker who confirmed them did not know of: an older one, which
-- ran on after the schema had changed. Their whole time to pay begins now. The log gets it as well, so that
-- orders can be rebuilt from it.
--
-- Answers how many orders were looked at: those of sales without a payment window have nothing to wait for.
WITH undated AS MATERIALIZED (
    SELECT id, sale_id FROM orders
    WHERE status = 'confirmed' AND key_fingerprint = ''
    LIMIT $1
    FOR UPDATE SKIP LOCKED
), dated AS (
    UPDATE orders AS o
    SET key_fingerprint = NULL,
        due = CASE WHEN s.payment_window_seconds > 0 THEN coalesce(o.due, (SELECT pay_clock()) + make_interval(secs => s.payment_window_seconds)) END
    FROM undated JOIN sales AS s ON s.id = undated.sale_id
    WHERE o.id = undated.id
    RETURNING o.id, o.due
), logged AS (
    UPDATE order_events AS e SET data = e.data || jsonb_build_object('due', dated.due)
    FROM dated
    WHERE e.order_id = dated.id AND e.type = 'OrderConfirmed' AND dated.due IS NOT NULL
)
SELECT count(*) FROM undated
