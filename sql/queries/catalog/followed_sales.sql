-- At most $1 sales, as find_sales.sql returns them without final units: those that sell, then paused, scheduled and ended
-- ones, each the newest first. Retired sales, which are most of those that are over, are found by the primary key.
SELECT id, name, stock, sold, state, per_order_limit, opens_at, closes_at,
       payment_window_seconds, payment_grace_seconds, payments_per_second, unit_price, currency, CASE WHEN items > 0 THEN items_of(id) END AS items,
       CASE WHEN items > 0 THEN ARRAY(SELECT i.sold FROM sale_items AS i WHERE i.sale_id = found.id ORDER BY item < 'a', item) END AS items_sold,
       epoch, revision, published_revision, partitions, shards, offers_only,
       (SELECT d.entries_id FROM draws AS d WHERE d.sale_id = found.id) AS entries_id, created_at, retired_at IS NOT NULL AS retired, archived_at IS NOT NULL AS archived, 0::bigint AS waiting, 0::bigint AS final
FROM (
    (SELECT *, CASE WHEN state = 'ended' OR closes_at <= now() THEN 4 WHEN state = 'paused' THEN 2 WHEN opens_at > now() THEN 3 ELSE 1 END AS rank
     FROM sales WHERE retired_at IS NULL ORDER BY rank, id DESC LIMIT $1)
    UNION ALL
    (SELECT *, 4 FROM sales WHERE retired_at IS NOT NULL ORDER BY id DESC LIMIT $1)
) AS found
ORDER BY rank, id DESC
LIMIT $1
