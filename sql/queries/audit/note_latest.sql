-- Notes the sequences $3 that the shards $2 of the sales $1 have reached by now.
UPDATE audit_shards AS a SET latest = n.latest
FROM unnest($1::uuid[], $2::integer[], $3::bigint[]) AS n (sale_id, shard, latest)
WHERE a.sale_id = n.sale_id AND a.shard = n.shard
