-- +goose Up
-- An entry holds many orders. One of them that cannot be applied becomes a dead letter of its own:
-- order_id names it, and fields are those of an entry with this order only. A dead letter without
-- order_id is a whole entry that cannot be read.
ALTER TABLE dead_letters ADD COLUMN order_id uuid;
ALTER TABLE dead_letters DROP CONSTRAINT dead_letters_stream_entry_id_key;
ALTER TABLE dead_letters ADD CONSTRAINT dead_letters_once UNIQUE NULLS NOT DISTINCT (stream, entry_id, order_id);

-- +goose Down
ALTER TABLE dead_letters DROP CONSTRAINT dead_letters_once;
ALTER TABLE dead_letters ADD CONSTRAINT dead_letters_stream_entry_id_key UNIQUE (stream, entry_id);
ALTER TABLE dead_letters DROP COLUMN order_id;
