-- The number of live orders of the sale $1, and their units.
SELECT count(*) AS orders, coalesce(sum(quantity), 0)::bigint AS units
FROM orders WHERE sale_id = $1 AND is_live(status)
