-- +goose Up

-- Units of a sale that are offered to the entrants of another sale, by rank: a draw, or a waiting list.

-- No order waits behind this migration while it waits for a lock.
SET LOCAL lock_timeout = '2s';

-- True for the goods of a draw, and for the sale in which people wait: it has a route of its own.
ALTER TABLE sales ADD offers_only boolean NOT NULL DEFAULT false;

-- A draw: the sale whose units are offered (the goods), and the sale in which people enter (the entries).
CREATE TABLE draws (
    sale_id         uuid PRIMARY KEY,
    entries_id      uuid NOT NULL CONSTRAINT draws_entries UNIQUE,
    -- draw: ranked by hash; waitlist: ranked by place.
    kind            text NOT NULL CHECK (kind IN ('draw', 'waitlist')),
    -- The seed is of the first round at or after the end of the entries and this time.
    freeze_seconds  bigint NOT NULL DEFAULT 0 CHECK (freeze_seconds >= 0),
    -- [{name, commitment, secret}]: the parties that make the seed, with the secrets that are revealed; NULL for drand.
    parties         jsonb,
    created_at      timestamptz NOT NULL DEFAULT now(),
    -- The frozen list: its length, and its root.
    entries         bigint CHECK (entries >= 0),
    root            bytea CHECK (octet_length(root) = 32),
    frozen_at       timestamptz,
    -- The round that gives the seed, and its signature.
    round           bigint,
    signature       bytea,
    seed            bytea CHECK (octet_length(seed) = 32),
    seeded_at       timestamptz,
    -- The time from which draw_ranks is whole, and how many ranks each item has, in the order of the items; one number in
    -- a sale without items.
    ranked_at       timestamptz,
    item_entries    bigint[],
    -- How many ranks had their turn: a count of draw_offers.
    offered         bigint NOT NULL DEFAULT 0 CHECK (offered >= 0),
    skipped         bigint NOT NULL DEFAULT 0 CHECK (skipped >= 0),
    -- Offers of earlier epochs of the sale whose orders were lost with Redis have been made again.
    offers_epoch    bigint NOT NULL DEFAULT 0,
    -- A draw without a seed in time ends without offers.
    voided_at       timestamptz,
    void_reason     text,
    CONSTRAINT draws_frozen CHECK ((frozen_at IS NULL) = (root IS NULL) AND (frozen_at IS NULL) = (entries IS NULL)),
    CONSTRAINT draws_frozen_before_seed CHECK (seeded_at IS NULL OR frozen_at < seeded_at)
);

-- The list of the entries, in the order of their ids, in chunks of 1,024.
CREATE TABLE draw_chunks (
    sale_id  uuid NOT NULL,
    chunk    integer NOT NULL CHECK (chunk >= 0),
    -- The id of its first entry: the chunk of an entry is the last one that begins at or before it.
    first_id uuid NOT NULL,
    -- 33 bytes for each entry: all that its leaf is made of.
    records  bytea NOT NULL,
    -- 16 bytes for each entry.
    ids      bytea NOT NULL,
    -- The root of the chunk.
    hash     bytea NOT NULL CHECK (octet_length(hash) = 32),
    PRIMARY KEY (sale_id, chunk),
    CHECK (octet_length(records) * 16 = octet_length(ids) * 33)
);
-- Hashes and random ids do not compress, and a part of them is read without the rest.
ALTER TABLE draw_chunks ALTER records SET STORAGE EXTERNAL, ALTER ids SET STORAGE EXTERNAL;
CREATE INDEX draw_chunks_first_id ON draw_chunks (sale_id, first_id);

-- What follows from the list and the seed, in chunks of 1,024, so that nobody must rank all entries to know one.
CREATE TABLE draw_ranks (
    sale_id uuid NOT NULL,
    chunk   integer NOT NULL CHECK (chunk >= 0),
    -- The rank of each place of the chunk, four bytes each. Ranks of each item count from 0.
    ranks   bytea NOT NULL,
    -- The places in the order of their ranks, four bytes each; one item follows the other.
    places  bytea NOT NULL,
    PRIMARY KEY (sale_id, chunk)
);
ALTER TABLE draw_ranks ALTER ranks SET STORAGE EXTERNAL, ALTER places SET STORAGE EXTERNAL;

-- What became of each rank that had its turn. In a waiting list ranks count those who had theirs.
CREATE TABLE draw_offers (
    sale_id    uuid NOT NULL,
    -- The letter of the item; '' in a sale without items.
    item       text COLLATE "C" NOT NULL DEFAULT '',
    rank       bigint NOT NULL CHECK (rank >= 0),
    -- The place of the entry in the list; in a waiting list, in the sale of the entries.
    place      bigint CHECK (place >= 0),
    entry_id   uuid NOT NULL,
    -- The order that was made of the offer; NULL if the rank was skipped.
    order_id   uuid,
    -- Why the rank was skipped.
    reason     text,
    offered_at timestamptz NOT NULL DEFAULT now(),
    -- The epoch of the sale in which the rank had its turn, the last one if it had another.
    epoch      bigint NOT NULL,
    PRIMARY KEY (sale_id, item, rank),
    CONSTRAINT draw_offers_of_entry UNIQUE (sale_id, entry_id),
    CHECK ((order_id IS NULL) = (reason IS NOT NULL))
);

-- +goose Down
DROP TABLE draw_offers, draw_ranks, draw_chunks, draws;
ALTER TABLE sales DROP offers_only;
