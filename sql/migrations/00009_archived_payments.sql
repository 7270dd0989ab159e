-- +goose Up

-- What became of the payments of archived sales, whose events are in a file: a late repeat of a report must not be taken for other
-- money. A row for each payment, from the time at which sales.archive has remembered_at; a restore of the file removes them.
CREATE TABLE archived_payments (
    reference   text COLLATE "C" PRIMARY KEY,
    sale_id     uuid NOT NULL,
    -- The rest is that of its last event, and the time of its first one.
    version     integer NOT NULL,
    position    bigint NOT NULL,
    type        text NOT NULL,
    order_id    uuid,
    amount      bigint,
    currency    char(3),
    reason      text,
    received_at timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    data        jsonb NOT NULL
);

CREATE INDEX archived_payments_of_sale ON archived_payments (sale_id);

-- +goose Down
DROP TABLE archived_payments;
