-- The next $3 orders of the sale $1 after the order $2, in the order in which they were made: all, or those with the status $4
-- that were reserved from $5 to before $6. Each of $4 to $6 may be NULL.
SELECT {{columns/order}}, o.sequence, o.epoch
FROM orders AS o LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = o.sale_id
WHERE o.sale_id = $1 AND o.id > $2 AND ($4::text IS NULL OR o.status = $4)
  AND ($5::timestamptz IS NULL OR o.reserved_at >= $5) AND ($6::timestamptz IS NULL OR o.reserved_at < $6)
ORDER BY o.id
LIMIT $3
