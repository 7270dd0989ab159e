-- Notes the commitments $2 for the draw of the sale $1.
-- Returns: the first that a draw has used before, by its place in $2, from 1. Of two draws at once one waits here.
WITH given AS (
    SELECT * FROM unnest($2::bytea[]) WITH ORDINALITY AS g (commitment, n)
), claimed AS (
    -- In one order, so that no two wait for each other.
    INSERT INTO draw_commitments (commitment, sale_id) SELECT commitment, $1 FROM given ORDER BY commitment
    ON CONFLICT (commitment) DO NOTHING
    RETURNING commitment
)
SELECT n FROM given WHERE NOT EXISTS (SELECT FROM claimed WHERE claimed.commitment = given.commitment) ORDER BY n LIMIT 1
