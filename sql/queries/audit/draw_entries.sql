-- What the list of a draw must have of the entries sale $1, which closed at $4: its orders after the id $2, up to $3, as in
-- draws/entries.sql.
SELECT id, user_id, quantity, coalesce(lines, '') AS lines, sequence, epoch, reserved_at
FROM orders
WHERE sale_id = $1 AND id > $2 AND id <= $3 AND (is_live(status) OR status = 'cancelled' AND updated_at > $4)
ORDER BY id
