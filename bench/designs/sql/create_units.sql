-- The units of sales, a row each, as long as they are not sold.
CREATE TABLE IF NOT EXISTS bench_units (
    sale_id uuid NOT NULL,
    unit    bigint NOT NULL,
    PRIMARY KEY (sale_id, unit)
)
