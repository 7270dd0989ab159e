-- +goose Up
-- The clock of deadlines is continuous when the clock of Postgres is set, forward or back (decision 9).

SET LOCAL lock_timeout = '3s';
-- The clock was set back, from ended_at to began_at: that much less time is lost.
ALTER TABLE outages ADD COLUMN back boolean NOT NULL DEFAULT false;

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lost_time() RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT lost FROM pulse), (SELECT sum(CASE WHEN back THEN began_at - ended_at ELSE ended_at - began_at END) FROM outages), '0')
$$;
-- After a move of the clock it stands still, until the next heartbeat adds the move to the lost time.
CREATE OR REPLACE FUNCTION pay_clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT CASE WHEN now() - seen_at NOT BETWEEN -outage_after AND outage_after THEN seen_at END FROM pulse), now()) - lost_time()
$$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION lost_time() RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT lost FROM pulse), (SELECT sum(ended_at - began_at) FROM outages), '0')
$$;
CREATE OR REPLACE FUNCTION pay_clock() RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT CASE WHEN now() - seen_at > outage_after THEN seen_at END FROM pulse), now()) - lost_time()
$$;
-- +goose StatementEnd
ALTER TABLE outages DROP COLUMN back;
