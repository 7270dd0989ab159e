-- Adds the traces in which orders were changed to their events, for the receivers of the relay (read_orders.sql): $3 are the
-- traceparents of the orders $2 of the sale $1, whose events have the version $4. It runs in the transaction that has written these
-- events, and only for orders that are traced.
UPDATE order_events AS e
SET data = e.data || jsonb_build_object('traceparent', traced.traceparent)
FROM ( -- as in change_orders.sql
    SELECT here.ctid, traced.traceparent FROM unnest($2::uuid[], $3::text[]) AS traced (order_id, traceparent)
    CROSS JOIN LATERAL (SELECT ctid FROM order_events WHERE sale_id = $1 AND order_id = traced.order_id AND version = $4 LIMIT 1) AS here
    LIMIT cardinality($2)
) AS traced
WHERE e.sale_id = $1 AND e.ctid = traced.ctid
