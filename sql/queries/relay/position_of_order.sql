-- The position of the event with the version $2 of the order $1, whose id ends as that of its sale; none if the event
-- came from another database (archive/insert_events.sql).
SELECT e.position
FROM sales AS s JOIN order_events AS e ON e.sale_id = s.id
WHERE right(s.id::text, 4) = right($1::uuid::text, 4) AND e.order_id = $1 AND e.version = $2 AND e.position > 0
