-- The sales of the orders that differ from their log, how many do, how many have a damaged one, and the first of those
-- with what is wrong.
SELECT sale_id, count(*) AS orders, count(*) FILTER (WHERE damaged) AS damaged, (array_agg(format('order %s: %s', id, what) ORDER BY id) FILTER (WHERE damaged))[1] AS example
FROM wrong_orders GROUP BY sale_id ORDER BY sale_id
