-- Records what became of ranks of the draw of the sale $1: the items $2, ranks $3, places $4, entries $5, and either the
-- orders $6 or the reasons $7 to skip it; $8 the epoch of the sale. A rank that had its turn before was offered (lost.sql).
WITH turn AS (
    SELECT * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::uuid[], $6::uuid[], $7::text[])
        AS t (item, rank, place, entry_id, order_id, reason)
), again AS (
    SELECT count(*) AS ranks FROM draw_offers JOIN turn USING (item, rank) WHERE sale_id = $1
), recorded AS (
    INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, reason, epoch)
    SELECT $1, turn.*, $8 FROM turn
    -- The times of turns that are repeated together differ: they were not together.
    ON CONFLICT (sale_id, item, rank) DO UPDATE
        SET order_id = excluded.order_id, reason = excluded.reason, epoch = excluded.epoch, offered_at = clock_timestamp()
    RETURNING order_id
), counted AS (SELECT count(*) AS ranks, count(order_id) AS offered FROM recorded)
UPDATE draws SET offered = draws.offered + counted.offered - again.ranks, skipped = skipped + counted.ranks - counted.offered
FROM counted, again WHERE sale_id = $1
