-- Notes the sequences $2 that the sales $1 have reached by now.
UPDATE audit_sales AS a SET latest = n.latest
FROM unnest($1::uuid[], $2::bigint[]) AS n (sale_id, latest)
WHERE a.sale_id = n.sale_id
