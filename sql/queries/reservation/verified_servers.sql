-- On which Redis server the stock of each partition is, as it was last made sure.
SELECT partition, run_id FROM redis_servers
