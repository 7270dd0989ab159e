-- All orders of the sale $1.
SELECT id, user_id, quantity, status FROM orders WHERE sale_id = $1
