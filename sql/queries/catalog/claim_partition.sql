-- Notes which Redis server the stock of a partition is on, unless one is noted.
-- $1 partition, $2 run id, $3 replication id
INSERT INTO redis_servers (partition, run_id, replication_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
