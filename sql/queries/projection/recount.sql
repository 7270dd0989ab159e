-- Recounts the counters of the sale $1; also returns right ones if $2. The caller puts counted.sql where the braces are.
--
-- Every change of the sale's orders changes its row last, in the same transaction. The caller has locked that row in a
-- statement of its own (catalog/lock_sale.sql), so this one sees exactly the orders that are counted there.
UPDATE sales AS s SET sold = c.sold, last_sequence = c.last_sequence
FROM (SELECT coalesce(max(sold), 0)::bigint AS sold, coalesce(max(last_sequence), 0) AS last_sequence FROM (
{{counted}}
) AS one) AS c, (SELECT sold, last_sequence FROM sales WHERE id = $1) AS before
WHERE s.id = $1 AND ($2 OR (s.sold, s.last_sequence) IS DISTINCT FROM (c.sold, c.last_sequence))
RETURNING before.sold, s.sold, before.last_sequence, s.last_sequence
