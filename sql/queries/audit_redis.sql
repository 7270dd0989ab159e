-- S7: sales that Redis has lost, or of which it has an older state than Postgres.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN NOT present AND published_revision = 0 THEN 'Redis has not been told of the sale'
            WHEN NOT present THEN 'Redis has lost the sale, which sells nothing until it is rebuilt from Postgres'
            WHEN redis_epoch = 0 THEN format('Redis has the sale closed for a rebuild, Postgres is in epoch %s', epoch)
            WHEN redis_epoch <> epoch THEN format('Redis has the stock of epoch %s, Postgres is in epoch %s', redis_epoch, epoch)
            ELSE format('Redis has given out %s places, and Postgres has an order at place %s: Redis was set back', latest, last_place)
       END AS what,
       CASE WHEN NOT present AND published_revision = 0 THEN 'worker' ELSE 'rebuild' END AS remedy
FROM audit_figures
WHERE NOT gone AND (NOT present OR redis_epoch <> epoch OR latest < last_place)
