-- The next entries of the list of a draw, at most $4, in the order of their ids, after the id $2: the orders of the sale
-- $1 that were live when it closed, at $3. What is in this list does not change after that time, so it can be read in
-- parts: an order that is cancelled later was live.
SELECT id, user_id, quantity, coalesce(lines, '') AS lines, sequence, epoch, reserved_at
FROM orders
WHERE sale_id = $1 AND id > $2 AND (is_live(status) OR status = 'cancelled' AND updated_at > $3)
ORDER BY id LIMIT $4
