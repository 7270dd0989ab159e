-- The dead letter with the id $1.
SELECT id, stream, entry_id, fields, reason, deliveries, status, replays, coalesce(resolution, ''), coalesce(replayed_as, ''), created_at, updated_at
FROM dead_letters
WHERE id = $1
