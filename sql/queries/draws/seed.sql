-- Gives the draw of the sale $1 its seed $2; $3 the signature of its round, null if parties made the seed.
UPDATE draws SET seed = $2, signature = $3, seeded_at = clock_timestamp() WHERE sale_id = $1
