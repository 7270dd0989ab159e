-- What sales.sold and sales.last_sequence follow from: the units of live orders, and the highest place that a confirmed
-- order has had. The caller puts a condition of sale_id where the braces are.
SELECT sale_id, coalesce(sum(quantity) FILTER (WHERE is_live(status)), 0) AS sold,
       coalesce(max(sequence) FILTER (WHERE status NOT IN ('rejected', 'voided')), 0) AS last_sequence
FROM orders WHERE {{sales}} GROUP BY sale_id
