-- Creates the sale of a file, $1. An idempotency key is one of the database in which the sale was created.
INSERT INTO sales ({{columns}})
SELECT {{columns}} FROM jsonb_populate_record(NULL::sales, $1::jsonb || '{"idempotency_key": null}')
