-- +goose Up
-- Who made the change of the sale: the name of an operator, or NULL where Stampede did it by itself.
ALTER TABLE sale_events ADD COLUMN operator text;
-- Who replayed or discarded the dead letter last.
ALTER TABLE dead_letters ADD COLUMN operator text;

-- +goose Down
ALTER TABLE dead_letters DROP COLUMN operator;
ALTER TABLE sale_events DROP COLUMN operator;
