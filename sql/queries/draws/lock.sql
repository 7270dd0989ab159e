-- Excludes other changes of the draw of the sale $1 until the end of the transaction.
SELECT sale_id FROM draws WHERE sale_id = $1 FOR NO KEY UPDATE
