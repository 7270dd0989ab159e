-- The draw or the waiting list of which the sale $1 is the goods or the entries: the names of the two sales, the entries
-- that are recorded, whether an operator ended them, whether a parked dead letter keeps their list from being frozen, and
-- how many of a waiting list wait, as catalog/find_sales.sql has it, and how many for each item.
SELECT d.sale_id, d.kind, g.name, e.name AS entries_name, e.sold AS entered, e.state = 'ended' AS entries_ended,
       d.kind = 'draw' AND d.frozen_at IS NULL AND e.closes_at <= now()
           AND EXISTS (SELECT FROM open_sale(d.entries_id) WHERE reason LIKE 'dead letter %') AS letter_waits,
       CASE WHEN d.kind = 'waitlist' THEN e.sold - (
           SELECT count(*) FROM draw_offers AS had JOIN orders AS o ON o.sale_id = d.entries_id AND o.id = had.entry_id
           WHERE had.sale_id = d.sale_id AND is_live(o.status)) ELSE 0 END AS waiting,
       CASE WHEN d.kind = 'waitlist' AND g.items > 0 THEN ARRAY(
           SELECT i.sold - (SELECT count(*) FROM draw_offers AS had JOIN orders AS o ON o.sale_id = d.entries_id AND o.id = had.entry_id
                            WHERE had.sale_id = d.sale_id AND had.item = i.item AND is_live(o.status))
           FROM sale_items AS i WHERE i.sale_id = d.entries_id ORDER BY i.item < 'a', i.item) END AS waiting_items
FROM draws AS d JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
WHERE d.sale_id = $1 OR d.entries_id = $1
