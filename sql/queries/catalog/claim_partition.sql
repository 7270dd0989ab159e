-- Records the Redis server of a partition, unless one is recorded.
-- $1 partition, $2 run id, $3 replication id
INSERT INTO redis_servers (partition, run_id, replication_id) VALUES ($1, $2, $3) ON CONFLICT (partition) DO NOTHING
