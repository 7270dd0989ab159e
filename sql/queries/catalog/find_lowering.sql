-- The state of the request to lower the stock of the sale $1 that is its revision $2, or of the
-- latest one if $2 is 0. No row if there is none.
--
-- Returns: its revision; done, if the stock was lowered; taken, the units because of which Redis
-- refused it, or null, and those of each item by its code, in the order of the items, or empty;
-- open, if it is undecided. None is true of a request that a rebuild has withdrawn.
SELECT e.revision, f.revision IS NOT NULL AS done, (e.data ->> 'taken')::bigint AS taken,
       CASE WHEN e.data ? 'item_taken' THEN (
           SELECT '{' || string_agg('"' || i.code || '":' || (e.data -> 'item_taken' ->> i.code), ',' ORDER BY i.item < 'a', i.item) || '}'
           FROM sale_items AS i WHERE i.sale_id = s.id AND e.data -> 'item_taken' ? i.code) ELSE '' END AS taken_items,
       f.revision IS NULL AND s.published_revision < e.revision AS open
FROM sales AS s JOIN sale_events AS e ON e.sale_id = s.id
LEFT JOIN sale_events AS f ON f.sale_id = s.id AND f.type = 'SaleRestocked' AND (f.data ->> 'lowering')::bigint = e.revision
WHERE s.id = $1 AND e.type = 'SaleLowering' AND (e.revision = $2 OR $2 = 0)
ORDER BY e.revision DESC
LIMIT 1
