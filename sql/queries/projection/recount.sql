-- Counts the units of live orders of the sale $1 anew, of which $2 is a place that a confirmed order has had.
--
-- Whoever changes orders of the sale changes its row last, in the same transaction. The caller has that row
-- locked by a statement of its own (catalog/lock_sale.sql): so this one sees all orders that are counted there, and no other.
UPDATE sales AS s SET sold = o.units, last_sequence = greatest(s.last_sequence, $2)
FROM (SELECT coalesce(sum(quantity), 0)::bigint AS units FROM orders WHERE sale_id = $1 AND status IN ('confirmed', 'paid')) AS o,
     (SELECT sold FROM sales WHERE id = $1) AS before
WHERE s.id = $1 AND (s.sold <> o.units OR s.last_sequence < $2)
RETURNING before.sold, s.sold
