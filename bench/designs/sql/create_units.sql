-- The unsold units of sales, one row each.
CREATE TABLE IF NOT EXISTS bench_units (
    sale_id uuid NOT NULL,
    unit    bigint NOT NULL,
    PRIMARY KEY (sale_id, unit)
)
