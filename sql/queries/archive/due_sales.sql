-- The sales that may be archived, oldest first: those that have left Redis, and those whose archiving was begun.
SELECT id FROM sales
WHERE retired_at IS NOT NULL AND archived_at IS NULL OR archive IS NOT NULL AND NOT archive ? 'deleted_at'
ORDER BY id
