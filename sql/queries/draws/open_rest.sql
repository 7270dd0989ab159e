-- Sells the units of the sale $1 that its draw has left to everybody, once each offer that was made is in Postgres: until then
-- it could be lost with Redis, and be made again. No row if one is not.
WITH opened AS (
    UPDATE sales SET offers_only = false, revision = revision + 1
    WHERE id = $1 AND NOT EXISTS (
        SELECT FROM draw_offers AS made WHERE made.sale_id = $1 AND made.order_id IS NOT NULL
        AND NOT EXISTS (SELECT FROM orders AS o WHERE o.sale_id = $1 AND o.id = made.order_id))
    RETURNING id, revision
)
INSERT INTO sale_events (sale_id, revision, type, data)
SELECT opened.id, opened.revision, 'DrawOpened', jsonb_build_object('offered', d.offered, 'skipped', d.skipped) FROM opened JOIN draws AS d ON d.sale_id = opened.id
RETURNING sale_id
