-- How many orders of each of the sales $1 have which status, and their paid units. It reads each order of these sales.
SELECT s.id, counted.*
FROM unnest($1::uuid[]) AS s(id) CROSS JOIN LATERAL (
    SELECT count(*) AS accepted,
           count(*) FILTER (WHERE status = 'confirmed') AS confirmed,
           count(*) FILTER (WHERE status = 'paid') AS paid,
           count(*) FILTER (WHERE status = 'cancelled') AS cancelled,
           count(*) FILTER (WHERE status = 'expired') AS expired,
           count(*) FILTER (WHERE status = 'rejected') AS rejected,
           count(*) FILTER (WHERE status = 'voided') AS voided,
           coalesce(sum(quantity) FILTER (WHERE status = 'paid'), 0)::bigint AS paid_units
    FROM orders WHERE sale_id = s.id
) AS counted
