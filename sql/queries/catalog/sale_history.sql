-- The newest $2 changes of the sale $1, oldest first.
SELECT revision, type, occurred_at, coalesce(operator, '') AS operator, data
FROM (SELECT * FROM sale_events WHERE sale_id = $1 ORDER BY revision DESC LIMIT $2) AS newest
ORDER BY revision
