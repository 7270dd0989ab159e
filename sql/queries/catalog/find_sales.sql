-- Sales with their final units, newest first (ids are in the order of creation).
-- $1 the ids, or null for all but those that are the places of a waiting list; $2 only sales older than this id, or null;
-- $3 how many at most; $4 whether to count paid units, which reads each paid order: never while a sale is locked
-- Returns: the definition of each sale; waiting: live entries of its waiting list that had no turn, null without one; and
-- final: paid units, or those of live orders where there is no payment window or the orders are archived.
SELECT {{columns/stored_sale}},
       CASE WHEN NOT $4 OR s.state = 'ended' THEN 0 ELSE (
            SELECT e.sold - (SELECT count(*) FROM draw_offers AS had JOIN orders AS o ON o.sale_id = d.entries_id AND o.id = had.entry_id
                             WHERE had.sale_id = s.id AND is_live(o.status))
            FROM draws AS d JOIN sales AS e ON e.id = d.entries_id WHERE d.sale_id = s.id AND d.kind = 'waitlist')
       END AS waiting,
       CASE WHEN NOT $4 THEN 0
            WHEN s.payment_window_seconds = 0 OR s.archived_at IS NOT NULL THEN s.sold
            ELSE (SELECT coalesce(sum(o.quantity), 0)::bigint FROM orders o WHERE o.sale_id = s.id AND o.status = 'paid')
       END AS final
FROM sales AS s
WHERE ($1::uuid[] IS NOT NULL OR NOT s.offers_only OR EXISTS (SELECT FROM draws AS d WHERE d.sale_id = s.id))
  AND ($1::uuid[] IS NULL OR s.id = ANY ($1)) AND ($2::uuid IS NULL OR s.id < $2)
ORDER BY s.id DESC
LIMIT $3
