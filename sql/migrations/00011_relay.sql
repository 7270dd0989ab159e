-- +goose Up
-- Events in the order of their positions are handed on to the targets of the relay.

-- Existing partitions keep an index that was created before this migration, for example concurrently.
CREATE INDEX order_events_position ON order_events (position);

-- SECURITY DEFINER, because an identity column needs no right to its sequence, and a default does.
-- +goose StatementBegin
CREATE FUNCTION next_position() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN nextval('order_events_position_seq');
END
$$;
-- The newest position that was given to an event, or 0. It is not settled: its transaction may still run.
CREATE FUNCTION newest_position() RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM order_events_position_seq);
END
$$;
-- +goose StatementEnd

-- Events of sales and orders share one order. Those from before this migration come after the orders of their time.
ALTER TABLE sale_events ADD COLUMN position bigint;
UPDATE sale_events AS e SET position = p.position
FROM (
    SELECT sale_id, revision, next_position() AS position
    FROM (SELECT sale_id, revision FROM sale_events ORDER BY occurred_at, sale_id, revision) AS old
) AS p
WHERE p.sale_id = e.sale_id AND p.revision = e.revision;
ALTER TABLE sale_events ALTER COLUMN position SET DEFAULT next_position(), ALTER COLUMN position SET NOT NULL,
    ADD CONSTRAINT sale_events_position UNIQUE (position);

-- The receivers of events. Every change by an operator changes the fence, which stops the process that delivers.
CREATE TABLE relay_targets (
    name          text PRIMARY KEY,
    url           text NOT NULL,
    -- disabled: the receiver has answered that it wants no more events.
    state         text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused', 'disabled')),
    -- All events up to and including this position are delivered.
    position      bigint NOT NULL CHECK (position >= 0),
    -- The delivery that may move the position: a process that was replaced has another number.
    fence         bigint NOT NULL DEFAULT 0,
    -- The process that delivers, for people who look.
    holder        text,
    -- The newest secret comes first. All of them sign.
    secrets       bytea[] NOT NULL DEFAULT '{}',
    allow_private boolean NOT NULL DEFAULT false,
    -- Failures in a row since the last success, the last of them, and the time before which nothing is sent.
    failures      integer NOT NULL DEFAULT 0 CHECK (failures >= 0),
    last_error    text,
    last_error_at timestamptz,
    retry_at      timestamptz,
    delivered_at  timestamptz,
    created_at    timestamptz NOT NULL DEFAULT now()
);

-- +goose Down
DROP TABLE relay_targets;
ALTER TABLE sale_events DROP COLUMN position;
DROP FUNCTION newest_position(), next_position();
DROP INDEX order_events_position;
