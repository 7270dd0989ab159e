-- The months of orders that have all their tables, oldest first: the lowest id of a sale in them and that of the next
-- month.
SELECT first, until FROM order_months WHERE orders IS NOT NULL AND events IS NOT NULL ORDER BY first
