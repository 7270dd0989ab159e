-- Deletes at most $2 orders of the archived sale $1, each with all of its events. Returns how many.
WITH chosen AS MATERIALIZED (
    SELECT id FROM orders WHERE sale_id = $1 ORDER BY id LIMIT $2
), more AS MATERIALIZED (
    SELECT id FROM chosen
    UNION
    SELECT order_id FROM (SELECT order_id FROM order_events WHERE sale_id = $1 ORDER BY order_id LIMIT CASE WHEN EXISTS (SELECT FROM chosen) THEN 0 ELSE $2::bigint END) AS rest
), events AS (
    DELETE FROM order_events AS e USING more WHERE e.sale_id = $1 AND e.order_id = more.id
), rows AS (
    DELETE FROM orders AS o USING more WHERE o.sale_id = $1 AND o.id = more.id
)
SELECT count(*) FROM more
