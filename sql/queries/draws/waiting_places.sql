-- The places of those who wait for the item $2 (its letter, or empty) of the sale $1, in their order, as waiting.sql has them:
-- the first $3.
SELECT array_agg(w.sequence ORDER BY w.sequence)
FROM (
    SELECT o.sequence
    FROM draws AS d JOIN orders AS o ON o.sale_id = d.entries_id
    WHERE d.sale_id = $1 AND d.kind = 'waitlist' AND is_live(o.status) AND coalesce(left(o.lines, 1), '') = $2
      AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
    ORDER BY o.sequence LIMIT $3
) AS w
