-- Takes $2 units of the sale $1, if it holds them, and answers the place of their order in the sale.
UPDATE sales SET sold = sold + $2, last_sequence = last_sequence + $2
WHERE id = $1 AND sold + $2 <= stock
RETURNING last_sequence
