-- The payments that wait for the orders $1, as find.sql has them, in the order in which they were reported, with the seconds since.
SELECT found.reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at, data,
       extract(epoch FROM now() - updated_at)::float8 AS waits
FROM unnest($1::uuid[]) AS wanted
CROSS JOIN LATERAL (SELECT reference FROM open_payments WHERE order_id = wanted AND state = 'waiting' LIMIT 100) AS open
CROSS JOIN LATERAL (SELECT * FROM payments WHERE reference = open.reference LIMIT 1) AS found
ORDER BY position
