-- The sales that may be archived, oldest first: those that have left Redis, and those whose archiving is not finished, or was done by a
-- version that did not remember their payments.
SELECT id FROM sales
WHERE retired_at IS NOT NULL AND archived_at IS NULL OR archive IS NOT NULL AND NOT archive ?& ARRAY['deleted_at', 'remembered_at']
ORDER BY id
