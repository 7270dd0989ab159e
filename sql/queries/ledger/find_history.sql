-- The order $2 of the sale $1, once for each event in its log, in their order. It is one statement, so order and log are of
-- one moment. Without a log, the event's version is 0. The events have no due and no pay_from: those of the order
-- are in force, which outages postpone. They have no lines: those of the order are the same.
SELECT {{columns/order}}, o.sequence, o.epoch,
       coalesce(e.version, 0) AS event_version, coalesce(e.type, '') AS event_type, coalesce(e.occurred_at, 'epoch') AS event_at, coalesce(e.data - '{due,pay_from,lines}'::text[], '{}') AS event_data
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
LEFT JOIN order_history AS e ON e.sale_id = $1 AND e.order_id = $2
WHERE o.sale_id = $1 AND o.id = $2
ORDER BY e.version
