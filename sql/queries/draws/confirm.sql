-- Notes a time $2 at which the list of the draw of the sale $1 was frozen and committed; the round $3 gives the seed, null
-- if parties do.
UPDATE draws SET frozen_at = $2, round = $3 WHERE sale_id = $1
