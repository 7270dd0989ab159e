-- The changes of a sale after a revision, in order.
-- $1 sale, $2 revision
SELECT revision, type, coalesce((data ->> 'stock')::bigint, 0) AS stock FROM sale_events
WHERE sale_id = $1 AND revision > $2
ORDER BY revision
