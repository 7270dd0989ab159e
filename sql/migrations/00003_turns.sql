-- +goose Up

-- Turns to pay of sales with a pace, on the clock pay_clock(), as deadlines are: those that are free, because their order
-- ended before they came, and the latest one that was given out (not free). The next orders get the earliest free ones that
-- are ahead, and those that have come are deleted then: a sale has at most one row for each turn ahead, and one more, however
-- many orders end.
CREATE TABLE pay_turns (
    sale_id uuid NOT NULL,
    turn    timestamptz NOT NULL,
    free    boolean NOT NULL,
    PRIMARY KEY (sale_id, turn, free)
);

-- +goose Down
DROP TABLE pay_turns;
