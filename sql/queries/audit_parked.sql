-- The parked dead letters of the streams $1.
SELECT id, stream, entry_id, fields, reason, deliveries, status, replays, coalesce(resolution, ''), coalesce(replayed_as, ''), created_at, updated_at
FROM dead_letters
WHERE status = 'parked' AND stream = ANY ($1::text[])
