-- Draws and waiting lists that need somebody to look, whose goods are not over: $1 draws, the void ones first, then those
-- whose entries have ended and are not ranked, and the $1 longest waiting lists.
--
-- Returns of each: how many wait in a list, as catalog/find_sales.sql has it, and what became of the latest $2 turns of each
-- item: offers that are open, the seconds since the oldest of them, those that expired, and those that were answered (paid,
-- cancelled, or without a payment window).
WITH watched AS (
    (SELECT d.sale_id, d.entries_id, d.kind, g.name, g.items, e.sold AS entered
     FROM draws AS d JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
     WHERE d.kind = 'draw' AND g.state <> 'ended' AND (g.closes_at <= now()) IS NOT TRUE
     ORDER BY d.voided_at IS NULL, e.closes_at > now(), d.ranked_at IS NOT NULL, e.closes_at, d.sale_id LIMIT $1)
    UNION ALL
    (SELECT d.sale_id, d.entries_id, d.kind, g.name, g.items, e.sold
     FROM draws AS d JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
     WHERE d.kind = 'waitlist' AND g.state <> 'ended' AND (g.closes_at <= now()) IS NOT TRUE
     ORDER BY e.sold - d.offered - d.skipped DESC, d.sale_id LIMIT $1)
)
SELECT w.sale_id, w.name, now() AS at,
       CASE WHEN w.kind = 'waitlist' THEN w.entered - (
           SELECT count(*) FROM draw_offers AS had
           CROSS JOIN LATERAL (SELECT status FROM orders WHERE sale_id = w.entries_id AND id = had.entry_id LIMIT 1) AS o -- as in ledger/find_orders.sql
           WHERE had.sale_id = w.sale_id AND is_live(o.status)) ELSE 0 END AS waiting,
       offers.open, offers.oldest, offers.expired, offers.answered
FROM watched AS w
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE of.is_open) AS open,
           coalesce(extract(epoch FROM now() - min(turn.offered_at) FILTER (WHERE of.is_open)), 0)::double precision AS oldest,
           count(*) FILTER (WHERE of.status = 'expired') AS expired,
           count(*) FILTER (WHERE (is_live(of.status) OR of.status = 'cancelled') AND NOT of.is_open) AS answered
    FROM (SELECT item FROM sale_items WHERE sale_id = w.sale_id UNION ALL SELECT '' WHERE w.items = 0) AS i
    CROSS JOIN LATERAL (
        SELECT order_id, offered_at FROM draw_offers WHERE sale_id = w.sale_id AND item = i.item ORDER BY rank DESC LIMIT $2
    ) AS turn
    LEFT JOIN LATERAL (SELECT status, due FROM orders WHERE sale_id = w.sale_id AND id = turn.order_id LIMIT 1) AS o ON true
    -- Without a row the order is on its way to Postgres.
    CROSS JOIN LATERAL (SELECT o.status, o.status IS NULL OR o.status = 'confirmed' AND o.due IS NOT NULL AS is_open) AS of
    WHERE turn.order_id IS NOT NULL
) AS offers
