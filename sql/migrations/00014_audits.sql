-- +goose Up
-- The verdicts of whole audits. Workers show the newest one, and alerts tell when it is old or a promise is broken.
CREATE TABLE audits (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at         timestamptz NOT NULL DEFAULT now(),
    operator   text,
    -- Names of promises, such as S4.
    broken     text[] NOT NULL,
    unchecked  text[] NOT NULL,
    -- Units moved during the audit, so that what it found may have been on its way.
    moving     boolean NOT NULL
);

-- +goose Down
DROP TABLE audits;
