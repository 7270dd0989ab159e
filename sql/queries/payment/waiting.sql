-- At most $2 waiting payments whose order Postgres has by now, or that were reported $1 seconds ago or earlier: oldest first.
SELECT reference, order_id, old FROM (
    SELECT w.reference, w.order_id, w.position, w.received_at <= now() - make_interval(secs => $1) AS old
    FROM payments AS w JOIN payment_events AS e USING (reference) WHERE e.type = 'PaymentReceived' AND e.sale_id IS NULL AND w.version = 1
) AS waiting
WHERE old OR EXISTS (
    -- The sale of an order has its last two bytes.
    SELECT FROM sales AS s JOIN orders AS o ON o.sale_id = s.id AND o.id = waiting.order_id WHERE right(s.id::text, 4) = right(waiting.order_id::text, 4))
ORDER BY position
LIMIT $2
