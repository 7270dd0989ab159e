-- All orders of the sale $1.
SELECT id, user_id, quantity, CASE WHEN lines IS NULL THEN '' ELSE order_items(sale_id, lines) END AS items, status FROM orders WHERE sale_id = $1
