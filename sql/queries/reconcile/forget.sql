-- Deletes the releases of those of the orders $2 of the sale $1 that have not ended. The caller has
-- locked those orders by a separate statement.
DELETE FROM releases AS r
WHERE r.sale_id = $1 AND r.order_id = ANY ($2::uuid[])
  AND NOT EXISTS (SELECT FROM orders AS o WHERE o.sale_id = $1 AND o.id = r.order_id AND NOT is_live(o.status))
RETURNING order_id
