-- The places of those who wait for units of the sale $1, in their order, as waiting.sql has them: the first $2.
SELECT array_agg(w.sequence ORDER BY w.sequence)
FROM (
    SELECT o.sequence
    FROM draws AS d JOIN orders AS o ON o.sale_id = d.entries_id
    WHERE d.sale_id = $1 AND d.kind = 'waitlist' AND o.status IN ('confirmed', 'paid')
      AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
    ORDER BY o.sequence LIMIT $2
) AS w
