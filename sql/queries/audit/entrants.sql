-- D2: users with more than one entry in a frozen list or in a waiting list.
SELECT d.entries_id AS sale_id, min(o.id::text)::uuid AS order_id, o.user_id,
       format('the user has %s entries for the units of the sale %s: %s', count(*), d.sale_id, left(string_agg(o.id::text, ', ' ORDER BY o.id), 200)) AS what,
       'draw' AS remedy
FROM draws AS d JOIN audit_sales USING (sale_id) JOIN sales AS e ON e.id = d.entries_id JOIN orders AS o ON o.sale_id = d.entries_id
WHERE (d.kind = 'waitlist' OR d.frozen_at IS NOT NULL)
  AND (is_live(o.status) OR d.kind = 'draw' AND o.status = 'cancelled' AND o.updated_at > e.closes_at)
GROUP BY d.entries_id, d.sale_id, o.user_id HAVING count(*) > 1
