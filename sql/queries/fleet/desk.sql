-- What an operator has to know beside the sales, in one row: the clock, the parked dead letters (counted up to 10000)
-- and the time of the oldest of them, the newest recorded audit, the Redis server of each partition as last verified,
-- the rebuilds whose process is alive, and whether Postgres takes no writes. since is the time of that audit; without
-- one, from when there is a sale to audit.
-- $1 after how many seconds without a heartbeat a rebuild counts as dead
SELECT clock_timestamp() AS clock, current_setting('transaction_read_only')::boolean AS read_only, parked.letters, parked.oldest, audit.at AS audited_at, coalesce(audit.at, (SELECT created_at FROM sales WHERE retired_at IS NULL ORDER BY id LIMIT 1)) AS since, audit.operator, audit.broken, audit.unchecked,
       (SELECT coalesce(json_object_agg(partition, run_id), '{}') FROM redis_servers) AS servers,
       (SELECT coalesce(json_agg(json_build_object(
                   'partition', partition, 'sale', coalesce(sale_id, '00000000-0000-0000-0000-000000000000'), 'reason', reason,
                   'since', began_at, 'step', step, 'sales_done', sales_done, 'sales_total', sales_total) ORDER BY began_at, id), '[]')
        FROM (SELECT * FROM rebuilds WHERE beat_at > now() - make_interval(secs => $1) ORDER BY began_at, id LIMIT 100) AS alive) AS rebuilds
FROM (SELECT count(*) AS letters, min(created_at) AS oldest FROM (SELECT created_at FROM dead_letters WHERE status = 'parked' LIMIT 10000) AS p) AS parked
LEFT JOIN (SELECT at, coalesce(operator, '') AS operator, broken, unchecked FROM audits ORDER BY id DESC LIMIT 1) AS audit ON true
