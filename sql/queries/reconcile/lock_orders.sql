-- Locks the orders $2 of the sale $1 until the end of the transaction.
SELECT id FROM orders WHERE sale_id = $1 AND id = ANY ($2::uuid[]) ORDER BY id FOR UPDATE
