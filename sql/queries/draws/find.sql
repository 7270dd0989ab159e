-- The draws of the sales $1, with what their sales say.
SELECT d.sale_id, d.entries_id, d.kind, d.created_at, d.freeze_seconds, d.parties, d.version, coalesce(d.entries, 0) AS entries, d.root, d.frozen_at,
       coalesce(d.round, 0) AS round, d.signature, d.seed, d.seeded_at, d.ranked_at, d.item_entries, d.voided_at, coalesce(d.void_reason, '') AS void_reason,
       d.offered, d.skipped, d.offers_epoch,
       frozen.data IS NOT NULL AS published, frozen.data -> 'goods' AS goods, g.epoch, e.closes_at, (e.closes_at <= now()) IS TRUE AS entries_over,
       e.state = 'ended' AS entries_ended, now() AS now, d.kind = 'draw' AND EXISTS (SELECT FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawOpened') AS opened,
       d.kind = 'draw' AND EXISTS (SELECT FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawOpening') AS opening,
       g.stock, CASE WHEN g.items > 0 THEN items_of(g.id) END AS items, g.partitions, g.shards,
       g.state = 'ended' OR (g.closes_at <= now()) IS TRUE AS goods_over, g.state = 'paused' AS goods_paused, g.state = 'ended' AS goods_ended
FROM draws AS d JOIN sales AS e ON e.id = d.entries_id JOIN sales AS g ON g.id = d.sale_id
LEFT JOIN LATERAL (SELECT data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawFrozen' ORDER BY revision LIMIT 1) AS frozen ON true
WHERE d.sale_id = ANY ($1::uuid[])
