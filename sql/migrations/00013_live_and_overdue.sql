-- +goose Up

-- What many queries ask of an order has one name and one formula. Postgres puts the formula in the place of a call, because
-- it is one expression that is neither STRICT nor of another role: so indexes whose condition is the formula serve the call.
-- PARALLEL SAFE, because Postgres looks at that before: without it, no query with a call would have parallel workers.
-- Each call is replaced whenever a statement is planned, so both are written in the form that is read fastest.

-- True for the status of a live order, which holds units. Indexes: orders_one_live_per_user, and orders_ended_of_user for
-- those that are not.
CREATE FUNCTION is_live(status text) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$SELECT status = ANY ('{confirmed,paid}')$$;

-- The latest deadline (orders.due) that is over, given what pulse has (seen_at and lost) and the grace of the sale.
--
-- The time to pay is over when an ingress has sent a heartbeat (seen_at) after the deadline: until then no ingress may have
-- been up to take the payment, and the next heartbeat may add an outage to lost, which moves the deadline. An outage moves
-- only deadlines after the last heartbeat before it, so an order that is overdue stays overdue. Of a sale with a grace an
-- order is overdue that much later.
CREATE FUNCTION last_overdue(seen_at timestamptz, lost interval, grace_seconds bigint) RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS
    $$SELECT least(seen_at, now()) - lost - coalesce(grace_seconds, 0) * interval '1 second'$$;

-- +goose Down
DROP FUNCTION is_live(text), last_overdue(timestamptz, interval, bigint);
