-- Removes what a rebuild needed. Run unchanged by the simple protocol, in one transaction.
DROP TABLE IF EXISTS orders_replaced, orders_next;
DROP FUNCTION IF EXISTS note_order_change() CASCADE;
DROP TABLE IF EXISTS order_changes;
