-- Makes the next revision of the sale $1, which changes no terms: the event $2 with the data $3.
WITH sale AS (UPDATE sales SET revision = revision + 1 WHERE id = $1 RETURNING id, revision)
INSERT INTO sale_events (sale_id, revision, type, data) SELECT id, revision, $2, $3 FROM sale
