-- The ids of the newest $1 sales.
SELECT id FROM sales ORDER BY id DESC LIMIT $1
