-- S3: orders that were recorded as reserved, without an outcome.
SELECT e.sale_id, e.order_id, e.user_id, 'the order has an OrderReserved event and no end' AS what, 'operator' AS remedy
FROM order_events AS e JOIN audit_sales USING (sale_id)
WHERE e.version = 1 AND NOT EXISTS (SELECT FROM order_events AS n WHERE n.order_id = e.order_id AND n.version > 1)
