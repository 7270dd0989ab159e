-- The parked dead letters.
SELECT id, stream, entry_id, order_id, fields, reason, deliveries, status, replays, coalesce(resolution, '') AS resolution, coalesce(replayed_as, '') AS replayed_as, coalesce(operator, '') AS operator,
       least(greatest(created_at, 'epoch'), '9999-12-31') AS created_at, least(greatest(updated_at, 'epoch'), '9999-12-31') AS updated_at
FROM dead_letters
WHERE status = 'parked'
