-- Gives the events of the orders $2 of the sale $1 the outcome and the reason of the orders, which record_orders.sql has just refused.
UPDATE order_events AS e
SET type = 'Order' || initcap(o.status), due = NULL, pay_from = NULL, data = e.data || jsonb_build_object('reason', o.reason)
FROM ( -- as in change_orders.sql
    SELECT here.ctid, refused.status, refused.reason FROM unnest($2::uuid[]) AS wanted (id)
    CROSS JOIN LATERAL (SELECT status, reason FROM orders WHERE sale_id = $1 AND id = wanted.id LIMIT 1) AS refused
    CROSS JOIN LATERAL (SELECT ctid FROM order_events WHERE sale_id = $1 AND order_id = wanted.id AND version = 2 LIMIT 1) AS here
    LIMIT cardinality($2)
) AS o
WHERE e.sale_id = $1 AND e.ctid = o.ctid
