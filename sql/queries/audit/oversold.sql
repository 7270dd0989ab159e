-- S1: more units are sold than there are, in Postgres or in Redis.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN available < 0 THEN format('Redis has %s units left', available)
            ELSE format('%s units are sold of a stock of %s', greatest(sold, live_units), stock) END AS what,
       CASE WHEN available < 0 THEN 'rebuild' WHEN live_units <= stock THEN 'recount' ELSE 'operator' END AS remedy
FROM audit_figures
WHERE greatest(sold, live_units) > stock OR available < 0
