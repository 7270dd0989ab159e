-- The entry of the user $2 in the waiting list of the sale $1: the live one, or else the latest, with what became of it.
SELECT e.id AS entry_id, e.sequence AS place, coalesce(left(e.lines, 1), '') AS item, NOT is_live(e.status) AS has_left, had.order_id,
       coalesce(had.reason, '') AS reason, had.rank IS NOT NULL AS decided,
       -- An order that is not in Postgres yet is on its way.
       had.order_id IS NOT NULL AND is_live(coalesce((SELECT status FROM orders WHERE sale_id = $1 AND id = had.order_id LIMIT 1), 'confirmed')) AS holds
FROM draws AS d
CROSS JOIN LATERAL (
    (SELECT * FROM orders WHERE sale_id = d.entries_id AND user_id = $2 AND is_live(status))
    UNION ALL
    (SELECT * FROM orders WHERE sale_id = d.entries_id AND user_id = $2 AND NOT is_live(status) ORDER BY id DESC LIMIT 1)
) AS e
LEFT JOIN draw_offers AS had ON had.sale_id = d.sale_id AND had.entry_id = e.id
WHERE d.sale_id = $1 AND d.kind = 'waitlist'
ORDER BY has_left LIMIT 1
