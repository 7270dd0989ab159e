-- The newest $2 dead letters with the status $1, or with any if it is empty.
SELECT id, stream, entry_id, order_id, fields, reason, deliveries, status, replays, coalesce(resolution, '') AS resolution, coalesce(replayed_as, '') AS replayed_as, coalesce(operator, '') AS operator,
       least(greatest(created_at, 'epoch'), '9999-12-31') AS created_at, least(greatest(updated_at, 'epoch'), '9999-12-31') AS updated_at
FROM dead_letters
WHERE $1 = '' OR status = $1
ORDER BY id DESC
LIMIT $2
