-- The entries of the waiting list of the item $3 (its letter, or empty) of the sale $1 that had no turn, by place: at most $4.
-- $2 the entries sale. An entry that is cancelled has left, and is skipped at its turn: its offer may be on its way.
SELECT o.id, o.reserved_at
FROM orders AS o
WHERE o.sale_id = $2 AND (is_live(o.status) OR o.status = 'cancelled') AND coalesce(left(o.lines, 1), '') = $3
  AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
ORDER BY o.sequence LIMIT $4
