-- Returns the number of units in live orders.
SELECT coalesce(sum(quantity), 0)::bigint FROM orders WHERE status IN ('confirmed', 'paid')
