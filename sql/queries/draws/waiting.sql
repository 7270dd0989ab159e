-- The entries of the waiting list of the sale $1 that wait, by place: at most $4 that were made before $3, null for all.
-- $2 the entries sale. An entry that is cancelled has left.
SELECT o.id
FROM orders AS o
WHERE o.sale_id = $2 AND o.status = 'confirmed' AND (o.reserved_at < $3) IS NOT FALSE
  AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
ORDER BY o.sequence, o.id LIMIT $4
