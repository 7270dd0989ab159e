-- +goose Up

-- Sales of which units may have to be offered: their units returned, their terms changed, or their entries were ranked. A
-- worker removes a sale when there is nothing left to offer, unless it was noted again meanwhile.
CREATE TABLE offers_due (
    sale_id uuid PRIMARY KEY,
    -- Another one each time that the sale is noted.
    turn    bigint NOT NULL GENERATED ALWAYS AS IDENTITY
);
-- What was left undone by the version before this one, which notes nothing.
INSERT INTO offers_due (sale_id) SELECT sale_id FROM draws;

-- +goose Down
DROP TABLE offers_due;
