-- How many claims of buyers each of the orders $1 has that it did not take.
SELECT order_id, count(*)::integer FROM payment_events WHERE order_id = ANY ($1::uuid[]) AND type = 'PaymentClaimed' GROUP BY order_id
