-- Stores a stream entry, or one order of it, that no worker can apply. Repeats change nothing.
--
-- $1 stream, $2 entry id, $3 fields, $4 reason, $5 deliveries
-- $6 the dead letter of which the entry is a replay, or NULL
-- $7 the order, or NULL for the whole entry
--
-- A replay that fails goes back to its own row, with its original fields. The row may still say parked, after a crash
-- before the replay was marked. An entry that only claims to be a replay, with other fields, gets a row of its own.
-- So does one whose id an entry with other fields has: a stream that was lost, or is that of a promoted replica, may give
-- an id a second time. Its row has a hash of its fields behind the id.
WITH again AS (
    UPDATE dead_letters
    SET entry_id = $2, reason = $4, deliveries = deliveries + $5, status = 'parked', updated_at = now()
    WHERE id = $6 AND stream = $1 AND entry_id <> $2 AND status <> 'discarded'
      AND (SELECT jsonb_agg(f ORDER BY n) FROM jsonb_array_elements(dead_letters.fields) WITH ORDINALITY AS e (f, n) WHERE f ->> 0 <> 'stampede_replay_of')
          IS NOT DISTINCT FROM
          (SELECT jsonb_agg(f ORDER BY n) FROM jsonb_array_elements($3::jsonb) WITH ORDINALITY AS e (f, n) WHERE f ->> 0 <> 'stampede_replay_of')
      AND NOT EXISTS (SELECT FROM dead_letters other WHERE other.stream = $1 AND other.entry_id = $2 AND other.order_id IS NOT DISTINCT FROM dead_letters.order_id)
    RETURNING id
)
INSERT INTO dead_letters (stream, entry_id, order_id, fields, reason, deliveries)
SELECT $1, $2 || CASE WHEN EXISTS (
           SELECT FROM dead_letters WHERE stream = $1 AND entry_id = $2 AND order_id IS NOT DISTINCT FROM $7 AND fields <> $3::jsonb)
       THEN '/' || md5($3::jsonb::text) ELSE '' END, $7, $3, $4, $5
WHERE NOT EXISTS (SELECT FROM again)
  AND NOT EXISTS (SELECT FROM dead_letters WHERE id = $6 AND stream = $1 AND entry_id = $2) -- it went back before
ON CONFLICT (stream, entry_id, order_id) DO NOTHING
