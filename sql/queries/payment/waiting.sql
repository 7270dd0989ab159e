-- At most $2 payments that wait, in the order in which they were reported, after the position $1: for how many seconds, whether Postgres has
-- the order by now, and whether it may have been lost when the stock of its sale was rebuilt, if not.
SELECT w.reference, w.order_id, w.position, extract(epoch FROM now() - w.since)::float8 AS waits, found, NOT found AND EXISTS (
    SELECT FROM sales AS s JOIN sale_events AS r ON r.sale_id = s.id AND r.type = 'SaleRebuilt'
    WHERE right(s.id::text, 4) = right(w.order_id::text, 4)
      -- The time at which the order was made is in its id.
      AND r.occurred_at > to_timestamp(('x' || left(replace(w.order_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0)
) AS rebuilt
FROM open_payments AS w CROSS JOIN LATERAL (
    -- The sale of an order has its last two bytes.
    SELECT EXISTS (SELECT FROM sales AS s JOIN orders AS o ON o.sale_id = s.id AND o.id = w.order_id WHERE right(s.id::text, 4) = right(w.order_id::text, 4)) AS found
) AS there
WHERE w.state = 'waiting' AND w.position > $1
ORDER BY w.position
LIMIT $2
