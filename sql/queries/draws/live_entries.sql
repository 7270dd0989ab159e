-- Of the entries sale $1, which closed at $2: the units that are sold, and the orders that were cancelled since; 0 if $3
-- units are sold, which saves the count.
SELECT sold, CASE WHEN sold = $3 THEN 0 ELSE (SELECT count(*) FROM orders WHERE sale_id = $1 AND status = 'cancelled' AND updated_at > $2) END AS cancelled
FROM sales WHERE id = $1
