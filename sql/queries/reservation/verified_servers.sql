-- The Redis server of each partition, as last verified.
SELECT partition, run_id FROM redis_servers
