-- Records the Redis server that holds the stock of a partition.
-- $1 partition, $2 run id, $3 replication id
INSERT INTO redis_servers (partition, run_id, replication_id) VALUES ($1, $2, $3)
ON CONFLICT (partition) DO UPDATE SET run_id = excluded.run_id, replication_id = excluded.replication_id, vouched_at = now()
