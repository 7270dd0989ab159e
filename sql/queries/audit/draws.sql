-- The draws and waiting lists of the audited sales, with what the relay has told of them.
SELECT d.sale_id, d.entries_id, d.kind, d.freeze_seconds, d.parties, coalesce(d.entries, 0) AS entries, d.root, d.frozen_at, coalesce(d.round, 0) AS round,
       d.signature, d.seed, d.seeded_at, d.ranked_at, d.item_entries, d.offered, d.skipped, e.closes_at, e.archived_at IS NOT NULL AS archived, g.items > 0 AS with_items,
       created.data AS created, coalesce(frozen.revision, 0) AS frozen_revision, frozen.data AS published, coalesce(seeded.revision, 0) AS seeded_revision, seeded.data AS revealed
FROM draws AS d JOIN audit_sales USING (sale_id) JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
LEFT JOIN LATERAL (SELECT data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawCreated' ORDER BY revision LIMIT 1) AS created ON true
LEFT JOIN LATERAL (SELECT revision, data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawFrozen' ORDER BY revision LIMIT 1) AS frozen ON true
LEFT JOIN LATERAL (SELECT revision, data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawSeeded' ORDER BY revision LIMIT 1) AS seeded ON true
ORDER BY d.sale_id
