-- Notes that all entries of the draw of the sale $1 are ranked, with how many ranks each item has ($2).
UPDATE draws SET ranked_at = now(), item_entries = $2 WHERE sale_id = $1 AND ranked_at IS NULL
