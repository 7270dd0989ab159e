-- The sales with waiting lists whose entries are not over.
SELECT d.sale_id
FROM draws AS d JOIN sales AS e ON e.id = d.entries_id
WHERE d.kind = 'waitlist' AND e.state <> 'ended' AND (e.closes_at <= now()) IS NOT TRUE
ORDER BY d.sale_id
