-- Notes that no unit returned to the shards $2 of the sales $1 while their buyers were read.
UPDATE audit_shards AS a SET still = true
FROM unnest($1::uuid[], $2::integer[]) AS n (sale_id, shard)
WHERE a.sale_id = n.sale_id AND a.shard = n.shard
