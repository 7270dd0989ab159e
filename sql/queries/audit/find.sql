-- The first $1 findings of a check, how many there are in all, and the last event of the order, or of the sale where a
-- finding names no order. The caller puts the check, which is a query without parameters, where the braces are.
SELECT sale_id, order_id, user_id, what, remedy, total, coalesce(
    CASE WHEN order_id IS NOT NULL THEN
        (SELECT concat(type, ' at version ', version) FROM order_events AS e WHERE e.sale_id = found.sale_id AND e.order_id = found.order_id ORDER BY version DESC LIMIT 1)
    ELSE
        (SELECT concat(type, ' at revision ', revision) FROM sale_events AS e WHERE e.sale_id = found.sale_id ORDER BY revision DESC LIMIT 1)
    END, '') AS last_event
FROM (SELECT *, count(*) OVER () AS total FROM (
{{check}}
) AS checked ORDER BY sale_id, order_id, what LIMIT $1) AS found ORDER BY sale_id, order_id, what
