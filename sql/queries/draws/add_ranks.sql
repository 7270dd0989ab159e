-- Notes that all entries of the draw of the sale $1 are ranked, with how many ranks each item has ($2). No offer of an
-- earlier epoch than $3 was made.
UPDATE draws SET ranked_at = now(), item_entries = $2, offers_epoch = $3 WHERE sale_id = $1 AND ranked_at IS NULL
