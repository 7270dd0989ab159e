-- Notes that Redis has been told of a sale's changes up to a revision.
-- $1 sale, $2 revision
UPDATE sales SET published_revision = $2 WHERE id = $1 AND published_revision < $2
