-- All orders of the sale $1; the last column tells whether the order is live.
SELECT id, user_id, quantity, status IN ('confirmed', 'paid') FROM orders WHERE sale_id = $1
