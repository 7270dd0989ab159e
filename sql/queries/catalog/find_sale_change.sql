-- The change that was made with an idempotency key: its revision, and the units that it added, also of each item by its code.
-- $1 sale, $2 idempotency key
SELECT revision, coalesce((data ->> 'units')::bigint, 0), data -> 'item_units' FROM sale_events WHERE sale_id = $1 AND idempotency_key = $2
