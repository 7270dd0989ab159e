-- Removes the orders $1 from orders_next, so that fill.sql can insert them again.
DELETE FROM orders_next WHERE id = ANY ($1::uuid[])
