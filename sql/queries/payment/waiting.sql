-- At most $2 waiting payments whose order Postgres has by now, or that were reported $1 seconds ago or earlier: the former first,
-- oldest first, so that others which wait for long do not hold them up; and of the latter any.
SELECT reference, order_id, old FROM (
    SELECT w.reference, w.order_id, w.position, w.received_at <= now() - make_interval(secs => $1) AS old,
           -- The sale of an order has its last two bytes.
           EXISTS (SELECT FROM sales AS s JOIN orders AS o ON o.sale_id = s.id AND o.id = w.order_id WHERE right(s.id::text, 4) = right(w.order_id::text, 4)) AS found
    FROM payments AS w JOIN payment_events AS e USING (reference) WHERE e.type = 'PaymentReceived' AND e.sale_id IS NULL AND w.version = 1
) AS waiting
WHERE old OR found
ORDER BY found DESC, CASE WHEN found THEN position END, random()
LIMIT $2
