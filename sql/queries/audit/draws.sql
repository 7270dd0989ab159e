-- The draws and waiting lists of the audited sales, with what the relay has told of them.
SELECT d.sale_id, d.entries_id, d.kind, d.freeze_seconds, d.parties, d.version, coalesce(d.entries, 0) AS entries, d.root, d.frozen_at, coalesce(d.round, 0) AS round,
       d.signature, d.seed, d.seeded_at, d.ranked_at, d.item_entries, d.offered, d.skipped, e.closes_at, e.archived_at IS NOT NULL AS archived, g.items > 0 AS with_items,
       created.data AS created, coalesce(frozen.revision, 0) AS frozen_revision, frozen.data AS published, coalesce(seeded.revision, 0) AS seeded_revision, seeded.data AS revealed,
       ARRAY(SELECT entry_id FROM (
           SELECT entry_id, d.kind = 'waitlist' AND place < max(place) OVER (PARTITION BY item ORDER BY rank ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS late
           FROM draw_offers WHERE sale_id = d.sale_id) AS turns WHERE late LIMIT 100) AS late,
       CASE WHEN d.version > 1 AND frozen.revision > 0 THEN jsonb_build_object(
           'stock', (
               SELECT b.data -> 'stock' FROM sale_events AS b
               WHERE b.sale_id = d.sale_id AND b.revision < frozen.revision AND b.data ? 'stock' AND b.type <> 'SaleLowering' ORDER BY b.revision DESC LIMIT 1),
           'items', (
               SELECT (SELECT jsonb_agg(jsonb_build_object('code', item -> 'code', 'stock', item -> 'stock') ORDER BY n)
                       FROM jsonb_array_elements(b.data -> 'items') WITH ORDINALITY AS of (item, n))
               FROM sale_events AS b
               WHERE b.sale_id = d.sale_id AND b.revision < frozen.revision AND jsonb_typeof(b.data -> 'items') = 'array' AND b.type <> 'SaleLowering' ORDER BY b.revision DESC LIMIT 1),
           'sold', CASE WHEN sold_before THEN CASE WHEN g.archived_at IS NOT NULL THEN frozen.data -> 'goods' -> 'sold'
               ELSE to_jsonb(coalesce((SELECT sum(quantity)::bigint FROM orders WHERE sale_id = d.sale_id AND reserved_at < frozen.occurred_at), 0)) END ELSE '0' END,
           'holders', CASE WHEN g.archived_at IS NOT NULL OR e.archived_at IS NOT NULL THEN frozen.data -> 'goods' -> 'holders' WHEN sold_before THEN (
               SELECT jsonb_agg(place) FROM jsonb_array_elements(frozen.data -> 'goods' -> 'holders') AS place
               JOIN draw_chunks AS c ON c.sale_id = d.sale_id AND c.chunk = place::bigint / 1024
               JOIN orders AS entry ON entry.sale_id = d.entries_id AND entry.id = encode(substring(ids FROM (16 * (place::bigint % 1024) + 1)::int FOR 16), 'hex')::uuid
               WHERE EXISTS (SELECT FROM orders AS own WHERE own.sale_id = d.sale_id AND own.user_id = entry.user_id AND own.reserved_at < frozen.occurred_at)) END
       ) END AS logged
FROM draws AS d JOIN audit_sales USING (sale_id) JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
LEFT JOIN LATERAL (SELECT data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawCreated' ORDER BY revision LIMIT 1) AS created ON true
LEFT JOIN LATERAL (SELECT revision, data, occurred_at FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawFrozen' ORDER BY revision LIMIT 1) AS frozen ON true
CROSS JOIN LATERAL (SELECT coalesce((frozen.data -> 'goods' ->> 'sold')::bigint, 0) > 0 OR frozen.data -> 'goods' ? 'holders' AS sold_before) AS claimed
LEFT JOIN LATERAL (SELECT revision, data FROM sale_events WHERE sale_id = d.sale_id AND type = 'DrawSeeded' ORDER BY revision LIMIT 1) AS seeded ON true
ORDER BY d.sale_id
