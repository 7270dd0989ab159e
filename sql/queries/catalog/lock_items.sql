-- Locks the items of the sale $1 until the end of the transaction. All who lock the sale too lock its items first.
SELECT FROM sale_items WHERE sale_id = $1 ORDER BY item FOR NO KEY UPDATE
