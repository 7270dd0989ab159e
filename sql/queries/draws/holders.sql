-- The places of the entrants ($2 the entries sale) who have a live order in the sale $1, in their order.
SELECT c.chunk::bigint * 1024 + (position(uuid_send(e.id) IN c.ids) - 1) / 16 AS place
FROM orders AS own
CROSS JOIN LATERAL (SELECT id FROM orders WHERE sale_id = $2 AND user_id = own.user_id AND is_live(status)) AS e
CROSS JOIN LATERAL (SELECT chunk, ids FROM draw_chunks WHERE sale_id = $1 AND first_id <= e.id ORDER BY first_id DESC LIMIT 1) AS c
WHERE own.sale_id = $1 AND is_live(own.status)
ORDER BY place
