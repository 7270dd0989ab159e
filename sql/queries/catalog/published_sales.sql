-- The sales that were ever published to Redis, with the number of their partitions.
SELECT id, partitions, shards FROM sales WHERE published_revision > 0
