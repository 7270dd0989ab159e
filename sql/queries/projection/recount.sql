-- Recounts the units of live orders of the sale $1, of which $2 is a place that a confirmed order has had.
--
-- Every change of the sale's orders changes its row last, in the same transaction. The caller has locked that row in a
-- statement of its own (catalog/lock_sale.sql), so this one sees exactly the orders that are counted there.
UPDATE sales AS s SET sold = o.units, last_sequence = greatest(s.last_sequence, $2)
FROM (SELECT coalesce(sum(quantity), 0)::bigint AS units FROM orders WHERE sale_id = $1 AND status IN ('confirmed', 'paid')) AS o,
     (SELECT sold FROM sales WHERE id = $1) AS before
WHERE s.id = $1 AND (s.sold <> o.units OR s.last_sequence < $2)
RETURNING before.sold, s.sold
