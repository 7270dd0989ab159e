-- Excludes other changes of a sale until the end of the transaction.
-- $1 id
SELECT id FROM sales WHERE id = $1 FOR NO KEY UPDATE
