-- Freezes the list of the draw of the sale $1: $2 entries with the root $3, at the time $4; the round $5 gives the seed,
-- null if parties do.
UPDATE draws SET entries = $2, root = $3, frozen_at = $4, round = $5 WHERE sale_id = $1
