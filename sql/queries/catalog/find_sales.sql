-- Sales with their final units, newest first (ids are in the order of creation).
-- $1 the ids, or null for all but those that are the places of a waiting list; $2 only sales older than this id, or null;
-- $3 how many at most; $4 whether to count paid units, which reads each paid order: never while a sale is locked
-- Returns: the definition of each sale; waiting: live entries of its waiting list that had no turn, null without one; and
-- final: paid units, or those of live orders where there is no payment window or the orders are archived.
SELECT id, name, stock, sold, state, per_order_limit, opens_at, closes_at,
       payment_window_seconds, payment_grace_seconds, payments_per_second, unit_price, currency, CASE WHEN items > 0 THEN items_of(id) END AS items,
       CASE WHEN items > 0 THEN ARRAY(SELECT i.sold FROM sale_items AS i WHERE i.sale_id = sales.id ORDER BY item < 'a', item) END AS items_sold,
       epoch, revision, published_revision, partitions, shards, offers_only,
       (SELECT d.entries_id FROM draws AS d WHERE d.sale_id = sales.id AND (d.kind = 'waitlist' OR sales.offers_only)) AS entries_id, (SELECT e.state = 'ended' FROM draws AS d JOIN sales AS e ON e.id = d.entries_id WHERE d.sale_id = sales.id AND d.kind = 'waitlist') IS TRUE AS waitlist_closed,
       (SELECT d.sale_id FROM draws AS d WHERE d.entries_id = sales.id) AS entry_for,
       created_at, retired_at IS NOT NULL AS retired, archived_at IS NOT NULL AS archived,
       CASE WHEN NOT $4 OR state = 'ended' THEN 0 ELSE (
            SELECT e.sold - (SELECT count(*) FROM draw_offers AS had JOIN orders AS o ON o.sale_id = d.entries_id AND o.id = had.entry_id
                             WHERE had.sale_id = sales.id AND o.status IN ('confirmed', 'paid'))
            FROM draws AS d JOIN sales AS e ON e.id = d.entries_id WHERE d.sale_id = sales.id AND d.kind = 'waitlist')
       END AS waiting,
       CASE WHEN NOT $4 THEN 0
            WHEN payment_window_seconds = 0 OR archived_at IS NOT NULL THEN sold
            ELSE (SELECT coalesce(sum(o.quantity), 0)::bigint FROM orders o WHERE o.sale_id = sales.id AND o.status = 'paid')
       END AS final
FROM sales
WHERE ($1::uuid[] IS NOT NULL OR NOT offers_only OR EXISTS (SELECT FROM draws AS d WHERE d.sale_id = sales.id))
  AND ($1::uuid[] IS NULL OR id = ANY ($1)) AND ($2::uuid IS NULL OR id < $2)
ORDER BY id DESC
LIMIT $3
