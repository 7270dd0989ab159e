-- What the file of the sale $1 must have: its events, their orders, the events of their payments, the rows of its draw, and the last
-- position.
WITH money AS (
    SELECT count(*) AS events, max(position) AS last FROM payment_events WHERE reference IN (SELECT reference FROM payment_events WHERE sale_id = $1)
)
SELECT count(*) AS events, count(DISTINCT order_id) AS orders, (SELECT events FROM money) AS payment_events,
       (SELECT count(*) FROM draws WHERE sale_id = $1) + (SELECT count(*) FROM draw_chunks WHERE sale_id = $1)
           + (SELECT count(*) FROM draw_ranks WHERE sale_id = $1) + (SELECT count(*) FROM draw_offers WHERE sale_id = $1) AS draw_rows,
       greatest(max(position), (SELECT last FROM money), 0) AS last_position
FROM order_events WHERE sale_id = $1
