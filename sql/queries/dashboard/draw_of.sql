-- The draw or the waiting list of which the sale $1 is the goods or the entries: the names of the two sales, and the entries
-- that are recorded.
SELECT d.sale_id, d.kind, g.name, e.name AS entries_name, e.sold AS entered
FROM draws AS d JOIN sales AS g ON g.id = d.sale_id JOIN sales AS e ON e.id = d.entries_id
WHERE d.sale_id = $1 OR d.entries_id = $1
