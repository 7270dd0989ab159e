-- Notes that units of those of the sales $1 that have a draw or a waiting list may have to be offered.
INSERT INTO offers_due (sale_id) SELECT sale_id FROM draws WHERE sale_id = ANY ($1::uuid[]) ORDER BY sale_id
ON CONFLICT (sale_id) DO UPDATE SET turn = DEFAULT
