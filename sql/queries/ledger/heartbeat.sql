-- Notes that an ingress is there now. If none was for longer than pulse.outage_after, that was an outage: it
-- is written down, and the clock of deadlines (pay_clock()) has stood still for as long.
--
-- Answers the seconds of the outage, 0 if there was none. Of several that ask at once one does the work, and
-- the others do nothing. It locks no order, so no order keeps it waiting. A clock that was set back makes no
-- outage: the next beat counts from it. A row that somebody deleted comes back.
WITH mine AS MATERIALIZED (
    SELECT seen_at, outage_after FROM pulse FOR UPDATE SKIP LOCKED
), outage AS (
    INSERT INTO outages (began_at, ended_at)
    SELECT seen_at, now() FROM mine WHERE now() - seen_at > outage_after
    RETURNING ended_at - began_at AS lasted
), beat AS (
    UPDATE pulse SET seen_at = now(), lost = lost + coalesce((SELECT lasted FROM outage), '0') FROM mine
), healed AS (
    INSERT INTO pulse (seen_at, lost) SELECT now(), lost_time() WHERE NOT EXISTS (SELECT FROM pulse) ON CONFLICT DO NOTHING
)
SELECT coalesce((SELECT extract(epoch FROM lasted) FROM outage), 0)::float8
