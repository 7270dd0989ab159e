-- Writes the turns to pay as the outage that began $2 seconds ago has moved them: at most $1, the next ones first, but for orders that others have
-- locked. This program reads a turn from the deadline; others read orders.pay_from, such as one of the version before, and people.
--
-- Returns how many were moved.
WITH moved AS (
    UPDATE orders AS o SET pay_from = late.turn
    FROM (
        SELECT found.* FROM sales AS s
        CROSS JOIN LATERAL (
            SELECT sale_id, id, due + lost_time() - make_interval(secs => s.payment_window_seconds) AS turn FROM orders
            WHERE sale_id = s.id AND pay_from > now() - make_interval(secs => $2) AND status = 'confirmed'
              AND abs(extract(epoch FROM due + lost_time() - make_interval(secs => s.payment_window_seconds) - pay_from)) > 1
            ORDER BY pay_from LIMIT $1 FOR UPDATE SKIP LOCKED
        ) AS found
        WHERE s.payments_per_second > 0 AND s.retired_at IS NULL
    ) AS late
    WHERE o.sale_id = late.sale_id AND o.id = late.id
    RETURNING o.sale_id, o.id, o.pay_from
), logged AS (
    UPDATE order_events AS e SET pay_from = moved.pay_from FROM moved
    WHERE e.sale_id = moved.sale_id AND e.order_id = moved.id AND e.version = 2
)
SELECT count(*) FROM moved
