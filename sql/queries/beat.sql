-- Notes that an ingress is there now. If none was for longer than $1, that was an outage: it is written
-- down, and the deadlines that lie behind its beginning are put off by what it took of their time.
--
-- Answers the seconds of the outage and the orders put off; 0 and 0 if there was none. Of several that ask
-- at once one does the work, and the others do nothing.
--
-- The outage ends at now(), when this statement began and before it looked at the orders. An order that it
-- does not see is younger than the outage, but for a commit's length.
WITH mine AS MATERIALIZED (
    SELECT seen_at FROM pulse FOR UPDATE SKIP LOCKED
), outage AS (
    INSERT INTO outages (began_at, ended_at)
    SELECT seen_at, now() FROM mine WHERE seen_at < now() - $1::interval
    RETURNING began_at, ended_at
), put_off AS (
    -- updated_at of a confirmed order is when it was confirmed: workers may go on while nobody can pay.
    UPDATE orders AS o SET expires_at = o.expires_at + (outage.ended_at - greatest(outage.began_at, o.updated_at))
    FROM outage
    WHERE o.status = 'confirmed' AND o.expires_at > outage.began_at
    RETURNING o.id
), beat AS (
    UPDATE pulse SET seen_at = greatest(pulse.seen_at, now()) FROM mine
)
SELECT coalesce((SELECT extract(epoch FROM ended_at - began_at) FROM outage), 0)::float8, (SELECT count(*) FROM put_off)
