-- S2: users with more than one live order in a sale.
SELECT sale_id, min(id::text)::uuid AS order_id, user_id,
       format('the user has %s live orders in the sale: %s', count(*), left(string_agg(id::text, ', ' ORDER BY id), 200)) AS what,
       'operator' AS remedy
FROM orders JOIN audit_sales USING (sale_id)
WHERE is_live(status)
GROUP BY sale_id, user_id HAVING count(*) > 1
