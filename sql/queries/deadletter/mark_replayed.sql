-- Marks the dead letter $1 as replayed: its entry was appended to its stream again, as $2. $3 is the operator, or NULL.
UPDATE dead_letters
SET status = 'replayed', replays = least(replays, 2147483646) + 1, replayed_as = $2, operator = $3, resolution = 'appended again as ' || $2::text, updated_at = now()
WHERE id = $1
