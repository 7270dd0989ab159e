-- How many of the orders $2 of the users $3 are live orders of these users in the sale $1.
SELECT count(*)
FROM unnest($2::uuid[], $3::text[]) AS held (id, user_id)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $1 AND id = held.id LIMIT 1) AS o -- as in find_orders.sql
WHERE o.user_id = held.user_id AND is_live(o.status)
