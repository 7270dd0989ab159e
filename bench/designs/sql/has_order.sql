-- Returns whether the user $2 has a live order in the sale $1.
SELECT EXISTS (SELECT FROM orders WHERE sale_id = $1 AND user_id = $2 AND status IN ('confirmed', 'paid'))
