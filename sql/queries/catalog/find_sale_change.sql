-- The change that was made with an idempotency key: its revision, and the units that it added.
-- $1 sale, $2 idempotency key
SELECT revision, coalesce((data ->> 'units')::bigint, 0) FROM sale_events WHERE sale_id = $1 AND idempotency_key = $2
