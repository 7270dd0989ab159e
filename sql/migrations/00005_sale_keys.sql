-- +goose Up

-- The idempotency key of the request that created the sale, by which a retry is recognized.
ALTER TABLE sales ADD COLUMN idempotency_key text;
CREATE UNIQUE INDEX sales_idempotency ON sales (idempotency_key) WHERE idempotency_key IS NOT NULL;

-- +goose Down
ALTER TABLE sales DROP COLUMN idempotency_key;
