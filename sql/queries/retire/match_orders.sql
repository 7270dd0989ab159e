-- How many of the orders $2 of the users $3 are live orders of these users in the sale $1.
SELECT count(*)
FROM orders AS o JOIN unnest($2::uuid[], $3::text[]) AS held (id, user_id) ON held.id = o.id AND held.user_id = o.user_id
WHERE o.sale_id = $1 AND o.id = ANY ($2::uuid[]) AND o.status IN ('confirmed', 'paid')
