-- The newest $1 changes of sales, of all sales, that were made since $2, oldest first.
SELECT e.sale_id, s.name, e.revision, e.type, e.occurred_at, coalesce(e.operator, '') AS operator, e.data
FROM (SELECT * FROM sale_events ORDER BY position DESC LIMIT $1) AS e JOIN sales AS s ON s.id = e.sale_id
WHERE e.occurred_at >= $2
ORDER BY e.position
