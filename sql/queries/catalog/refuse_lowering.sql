-- Records in the event of a request to lower the stock that Redis refused it, once.
-- $1 sale, $2 revision of the request, $3 units that were taken, $4 those of each item that had too few left, by its code, or null
UPDATE sale_events SET data = data || jsonb_strip_nulls(jsonb_build_object('taken', $3::bigint, 'item_taken', $4::jsonb))
WHERE sale_id = $1 AND revision = $2 AND NOT data ? 'taken'
