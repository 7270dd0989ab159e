-- S7: sales that are retired in only one of Redis and Postgres. A retired sale has no buyers in Redis.
SELECT f.sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN s.retired_at IS NULL THEN 'Redis has retired the sale, and Postgres has not: it was set back'
            ELSE format('the sale is retired, and Redis still has %s buyers and %s ended orders of it', found.buyers, found.ended)
       END AS what,
       CASE WHEN s.retired_at IS NOT NULL AND s.published_revision < s.revision THEN 'worker' ELSE 'rebuild' END AS remedy
FROM audit_figures AS f JOIN sales AS s ON s.id = f.sale_id
CROSS JOIN LATERAL (
    SELECT (SELECT count(*) FROM audit_buyers WHERE sale_id = f.sale_id) AS buyers,
           (SELECT count(*) FROM audit_ended WHERE sale_id = f.sale_id) AS ended,
           (SELECT bool_or(present) FROM audit_shards WHERE sale_id = f.sale_id) AS present,
           (SELECT bool_or(state = 'retired') FROM audit_shards WHERE sale_id = f.sale_id) AS retired
) AS found
WHERE CASE WHEN s.retired_at IS NULL THEN found.retired ELSE found.buyers > 0 OR found.ended > 0 OR found.present END
