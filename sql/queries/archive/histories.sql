-- The distinct histories of the orders of a file, with one of the orders.
SELECT types, (array_agg(order_id))[1] AS order_id, count(*) AS orders
FROM (SELECT order_id, array_agg(type ORDER BY version) AS types FROM archived_events GROUP BY order_id) AS orders
GROUP BY types
