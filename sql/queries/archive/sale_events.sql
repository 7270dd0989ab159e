-- The events of the sale $1 itself, as JSON.
SELECT coalesce(jsonb_agg(to_jsonb(e) ORDER BY revision), '[]') FROM sale_events AS e WHERE sale_id = $1
