-- The sale $1 is not archived any more.
UPDATE sales SET archived_at = NULL, archive = NULL WHERE id = $1
