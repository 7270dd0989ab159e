-- The newest live order of each shard of a sale, as far as its place tells the shard: all places of a shard have the
-- same remainder. Orders of before the number of shards was raised may have that of another shard.
-- $1 sale, $2 its shards
SELECT newest.*
FROM generate_series(0, $2 - 1) AS shard CROSS JOIN LATERAL (
    SELECT id, user_id, sequence FROM orders
    WHERE sale_id = $1 AND is_live(status) AND (sequence - 1) % $2 = shard
    ORDER BY id DESC LIMIT 1
) AS newest
