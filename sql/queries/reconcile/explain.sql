-- All lasting differences, with the last event of the order, or of the sale where no order is named.
SELECT sale_id, order_id, coalesce(user_id, '') AS user_id, what, coalesce(
           CASE WHEN order_id IS NOT NULL THEN
               (SELECT concat(type, ' at version ', version) FROM order_events AS e WHERE e.sale_id = f.sale_id AND e.order_id = f.order_id ORDER BY version DESC LIMIT 1)
           ELSE
               (SELECT concat(type, ' at revision ', revision) FROM sale_events AS e WHERE e.sale_id = f.sale_id ORDER BY revision DESC LIMIT 1)
           END, '') AS last_event,
       remedy
FROM reconcile_found AS f
ORDER BY n
