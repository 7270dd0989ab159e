-- Records that a sale's changes are published to Redis up to a revision. Its units may be offered since (draws/note_due.sql).
-- $1 sale, $2 revision
WITH marked AS (
    UPDATE sales SET published_revision = $2 WHERE id = $1 AND published_revision < $2 RETURNING id
)
INSERT INTO offers_due (sale_id) SELECT d.sale_id FROM marked JOIN draws AS d ON d.sale_id = marked.id
ON CONFLICT (sale_id) DO UPDATE SET turn = DEFAULT
