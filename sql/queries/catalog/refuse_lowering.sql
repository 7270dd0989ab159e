-- Records in the event of a request to lower the stock that Redis refused it, once.
-- $1 sale, $2 revision of the request, $3 units that were taken
UPDATE sale_events SET data = data || jsonb_build_object('taken', $3::bigint) WHERE sale_id = $1 AND revision = $2 AND NOT data ? 'taken'
