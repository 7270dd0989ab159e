-- The distinct histories in the log of the orders of a month, and how many orders have each of them.
-- $1, $2 the sales from $1 to before $2
--
-- Returns: the types of the events in their order; whether versions have no gap, all events are of the same user and
-- quantity, and the first one has the order's place and the time of its reservation; the number of orders; and one of
-- them.
SELECT types, whole, count(*), (array_agg(order_id))[1]
FROM (
    SELECT order_id, array_agg(type ORDER BY version) AS types,
           min(version) = 2 AND max(version) = count(*) + 1
               AND min(user_id) = max(user_id) AND min(quantity) = max(quantity)
               AND coalesce(bool_and(data ? 'sequence' AND data ? 'epoch' AND reserved_at IS NOT NULL) FILTER (WHERE version = 2), false) AS whole
    FROM order_events
    WHERE sale_id >= $1 AND sale_id < $2
    GROUP BY sale_id, order_id
) AS orders
GROUP BY types, whole
