-- Makes the next revision of a sale, and its event.
-- $1 id, $2 state, $3 stock, $4 type of the event, $5 its data, $6 idempotency key or null
-- Returns: the revision.
WITH sale AS (
    UPDATE sales SET state = $2, stock = $3, revision = revision + 1 WHERE id = $1
    RETURNING id, revision
)
INSERT INTO sale_events (sale_id, revision, type, data, idempotency_key)
SELECT id, revision, $4, $5, $6 FROM sale
RETURNING revision
