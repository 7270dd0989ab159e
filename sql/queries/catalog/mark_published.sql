-- Records that a sale's changes are published to Redis up to a revision.
-- $1 sale, $2 revision
UPDATE sales SET published_revision = $2 WHERE id = $1 AND published_revision < $2
