-- Records what became of ranks of the draw of the sale $1: the items $2, ranks $3, places $4, entries $5, and either the
-- orders $6 or the reasons $7 to skip it.
WITH recorded AS (
    INSERT INTO draw_offers (sale_id, item, rank, place, entry_id, order_id, reason)
    SELECT $1, * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::uuid[], $6::uuid[], $7::text[])
    RETURNING order_id
), counted AS (SELECT count(*) AS ranks, count(order_id) AS offered FROM recorded)
UPDATE draws SET offered = draws.offered + counted.offered, skipped = skipped + ranks - counted.offered
FROM counted WHERE sale_id = $1
