-- Locks the wrong rows until the end of the transaction, deletes those without a log, and withdraws the others from the
-- index of live orders: of two orders of one user, the wrong row may be the live one.
-- $1, $2 the sales from $1 to before $2
WITH deleted AS (
    DELETE FROM orders AS o USING wrong_orders AS w
    WHERE o.sale_id >= $1 AND o.sale_id < $2 AND o.sale_id = w.sale_id AND o.id = w.id
      AND NOT EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = w.sale_id AND e.order_id = w.id AND e.sale_id >= $1 AND e.sale_id < $2)
)
UPDATE orders AS o SET status = 'voided'
FROM wrong_orders AS w
WHERE o.sale_id >= $1 AND o.sale_id < $2 AND o.sale_id = w.sale_id AND o.id = w.id
  AND EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = w.sale_id AND e.order_id = w.id AND e.sale_id >= $1 AND e.sale_id < $2)
