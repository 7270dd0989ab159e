-- The dead letter with the id $1, for whoever is about to settle it: the row stays locked until the
-- transaction ends.
SELECT id, stream, entry_id, fields, reason, deliveries, status, replays, coalesce(resolution, ''), coalesce(replayed_as, ''), created_at, updated_at
FROM dead_letters
WHERE id = $1
FOR UPDATE
