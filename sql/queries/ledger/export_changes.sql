-- The orders with an event after the position $1, up to $2, as they are now, in the order of these events. An order that has
-- a later event up to $3 is left out: it comes with that one. Of a sale $4, a user $5, with a status $6, reserved from $7
-- to before $8; each of these may be NULL.
--
-- The last event is not found by a join, for which Postgres may read all events.
SELECT {{columns/order}}, o.sequence, o.epoch
FROM order_events AS e JOIN orders AS o ON o.sale_id = e.sale_id AND o.id = e.order_id LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE e.position > $1 AND e.position <= $2
  AND e.version = (SELECT max(version) FROM order_events AS l WHERE l.sale_id = e.sale_id AND l.order_id = e.order_id AND l.position <= $3)
  AND ($4::uuid IS NULL OR e.sale_id = $4) AND ($5::text IS NULL OR e.user_id = $5) AND ($6::text IS NULL OR o.status = $6)
  AND ($7::timestamptz IS NULL OR o.reserved_at >= $7) AND ($8::timestamptz IS NULL OR o.reserved_at < $8)
ORDER BY e.position
