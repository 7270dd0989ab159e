-- Makes the next revision of the sale $1 with the same terms, and its event with the repairs $2.
WITH sale AS (
    UPDATE sales SET revision = revision + 1 WHERE id = $1
    RETURNING id, revision
)
INSERT INTO sale_events (sale_id, revision, type, data)
SELECT id, revision, 'SaleReconciled', $2::jsonb FROM sale
