-- Records a heartbeat of an ingress. If there was none for longer than pulse.outage_after, that was an outage: it is
-- recorded, and the clock of deadlines (pay_clock()) has stood still for as long.
--
-- Returns the seconds of the outage, or 0. Of several concurrent calls one does the work. It locks no order, so no
-- order blocks it. A clock that was set back makes no outage: the next heartbeat counts from it. A row that was
-- deleted is inserted again.
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
