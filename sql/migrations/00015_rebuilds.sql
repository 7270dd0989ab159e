-- +goose Up
-- Rebuilds of stock in Redis that are under way, for who watches them: nothing decides by this table. The process that
-- rebuilds writes its row about every second, and deletes it at the end. The row of a process that died stays, with an
-- old beat_at, until another rebuild removes it.
CREATE TABLE rebuilds (
    id          uuid PRIMARY KEY,
    partition   integer NOT NULL,
    -- NULL for all sales of the partition.
    sale_id     uuid,
    reason      text NOT NULL,
    -- The host and the process that rebuilds.
    process     text NOT NULL,
    began_at    timestamptz NOT NULL,
    beat_at     timestamptz NOT NULL DEFAULT now(),
    step        text NOT NULL,
    sales_done  integer NOT NULL,
    -- 0 before the sales are counted.
    sales_total integer NOT NULL
);

-- +goose Down
DROP TABLE rebuilds;
