-- The places of all who wait for units of the sale $1, in their order, as waiting.sql has them.
SELECT array_agg(o.sequence ORDER BY o.sequence)
FROM draws AS d JOIN orders AS o ON o.sale_id = d.entries_id
WHERE d.sale_id = $1 AND d.kind = 'waitlist' AND o.status = 'confirmed'
  AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = $1 AND had.entry_id = o.id)
