-- S3: unpaid orders without a deadline.
SELECT o.sale_id, o.id AS order_id, o.user_id, 'the order awaits payment and has no deadline' AS what,
       CASE WHEN EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = o.sale_id AND e.order_id = o.id AND e.due IS NOT NULL) THEN 'projections' ELSE 'operator' END AS remedy
FROM orders AS o JOIN audit_sales USING (sale_id) JOIN sales AS s ON s.id = o.sale_id
WHERE o.status = 'confirmed' AND s.payment_window_seconds > 0 AND o.due IS NULL
