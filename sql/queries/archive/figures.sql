-- What the file of the sale $1 must have: its events, their orders, and the last position of them.
SELECT count(*) AS events, count(DISTINCT order_id) AS orders, coalesce(max(position), 0) AS last_position
FROM order_events WHERE sale_id = $1
