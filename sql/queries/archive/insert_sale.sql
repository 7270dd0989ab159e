-- Creates the sale of a file, $1, unless Postgres has it.
INSERT INTO sales SELECT * FROM jsonb_populate_record(NULL::sales, $1) ON CONFLICT DO NOTHING
