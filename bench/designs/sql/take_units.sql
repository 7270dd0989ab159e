-- Takes $2 units of the sale $1 if that many are left, and returns the sequence of their order.
UPDATE sales SET sold = sold + $2, last_sequence = last_sequence + $2
WHERE id = $1 AND sold + $2 <= stock
RETURNING last_sequence
