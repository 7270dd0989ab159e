-- Gives the events of the orders $2 of the sale $1 the outcome and the reason of the orders, which record_orders.sql has just refused.
UPDATE order_events AS e
SET type = 'Order' || initcap(o.status), due = NULL, pay_from = NULL, data = e.data || jsonb_build_object('reason', o.reason)
FROM orders AS o
WHERE o.sale_id = $1 AND o.id = e.order_id AND e.sale_id = $1 AND e.version = 2 AND e.order_id = ANY ($2::uuid[])
