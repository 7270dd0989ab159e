-- +goose Up
SET LOCAL lock_timeout = '2s';

-- note_commitments finds names in its own schema, as in migration 00001.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- How a draw makes its seed from its parties, and what is public of it: docs/draws-format.md. Draws from before this
-- migration, and those that an older program creates beside it, have version 1.
ALTER TABLE draws ADD version smallint NOT NULL DEFAULT 1;

-- What the parties of any draw ever committed to. Their secrets may be public, also those of a void draw, so no
-- commitment is used twice. No row is ever removed.
CREATE TABLE draw_commitments (
    commitment bytea PRIMARY KEY CHECK (octet_length(commitment) = 32),
    -- The first draw that used it.
    sale_id    uuid NOT NULL
);

-- It keeps the table whoever adds a draw. SECURITY DEFINER, because not all who do need a right to the table.
-- +goose StatementBegin
CREATE FUNCTION note_commitments() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO draw_commitments (commitment, sale_id)
    SELECT decode(party ->> 'commitment', 'hex'), sale_id FROM added, jsonb_array_elements(parties) AS party
    ON CONFLICT (commitment) DO NOTHING;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION note_commitments() FROM PUBLIC;
CREATE TRIGGER note_commitments AFTER INSERT ON draws
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION note_commitments();

INSERT INTO draw_commitments (commitment, sale_id)
SELECT decode(party ->> 'commitment', 'hex'), sale_id FROM draws, jsonb_array_elements(parties) AS party ORDER BY created_at
ON CONFLICT (commitment) DO NOTHING;

-- +goose Down
DROP TRIGGER note_commitments ON draws;
DROP FUNCTION note_commitments();
DROP TABLE draw_commitments;
ALTER TABLE draws DROP version;
