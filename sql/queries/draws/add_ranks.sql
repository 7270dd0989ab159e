-- Notes that all entries of the draw of the sale $1 are ranked, with how many ranks each item has ($2), and that units may be
-- offered (draws/note_due.sql). No offer of an earlier epoch than $3 was made.
WITH ranked AS (
    UPDATE draws SET ranked_at = now(), item_entries = $2, offers_epoch = $3 WHERE sale_id = $1 AND ranked_at IS NULL
    RETURNING sale_id
)
INSERT INTO offers_due (sale_id) SELECT sale_id FROM ranked
ON CONFLICT (sale_id) DO UPDATE SET turn = DEFAULT
