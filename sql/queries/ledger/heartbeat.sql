-- Records a heartbeat of an ingress. If the clock of Postgres has moved by more than pulse.outage_after since the last
-- one, in either direction, there was an outage, or the clock was set: that is recorded, and the clock of deadlines
-- (pay_clock()) has stood still for as long.
--
-- Returns the seconds of it, below 0 if the clock was set back, or 0. Of several concurrent calls one does the work. It
-- locks no order, so no order blocks it. A row that was deleted is inserted again.
WITH mine AS MATERIALIZED (
    SELECT seen_at, outage_after FROM pulse FOR UPDATE SKIP LOCKED
), outage AS (
    INSERT INTO outages (began_at, ended_at, back)
    SELECT least(seen_at, now()), greatest(seen_at, now()), now() < seen_at
    FROM mine WHERE now() - seen_at NOT BETWEEN -outage_after AND outage_after
    RETURNING CASE WHEN back THEN began_at - ended_at ELSE ended_at - began_at END AS lasted
), beat AS (
    UPDATE pulse SET seen_at = now(), lost = lost + coalesce((SELECT lasted FROM outage), '0') FROM mine
), healed AS (
    INSERT INTO pulse (seen_at, lost) SELECT now(), lost_time() WHERE NOT EXISTS (SELECT FROM pulse) ON CONFLICT (one_row) DO NOTHING
)
SELECT coalesce((SELECT extract(epoch FROM lasted) FROM outage), 0)::float8
