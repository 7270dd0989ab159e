-- How many orders of each of the sales $1 have which status, and their paid units. It reads each order of these sales;
-- grouping first compares each status once instead of seven times.
SELECT s.id,
       coalesce(sum(orders), 0)::bigint AS accepted,
       coalesce(sum(orders) FILTER (WHERE status = 'confirmed'), 0)::bigint AS confirmed,
       coalesce(sum(orders) FILTER (WHERE status = 'paid'), 0)::bigint AS paid,
       coalesce(sum(orders) FILTER (WHERE status = 'cancelled'), 0)::bigint AS cancelled,
       coalesce(sum(orders) FILTER (WHERE status = 'expired'), 0)::bigint AS expired,
       coalesce(sum(orders) FILTER (WHERE status = 'rejected'), 0)::bigint AS rejected,
       coalesce(sum(orders) FILTER (WHERE status = 'voided'), 0)::bigint AS voided,
       coalesce(sum(units) FILTER (WHERE status = 'paid'), 0)::bigint AS paid_units
FROM unnest($1::uuid[]) AS s(id) LEFT JOIN LATERAL (
    SELECT status, count(*) AS orders, sum(quantity) AS units FROM orders WHERE sale_id = s.id GROUP BY status
) AS counted ON true
GROUP BY s.id
