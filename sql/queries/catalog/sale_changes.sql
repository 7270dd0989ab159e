-- The changes of a sale after a revision, in order: the stock that it had then, and the units that were added, or
-- removed if it is below zero, of each item by its code too if the sale has items; and its items if they changed.
-- $1 sale, $2 revision
SELECT revision, type, coalesce((data ->> 'stock')::bigint, 0) AS stock,
       coalesce((data ->> 'units')::bigint, 0) AS units,
       data -> 'items' AS items, data -> 'item_units' AS item_units
FROM sale_events
WHERE sale_id = $1 AND revision > $2
ORDER BY revision
