-- One of the sales $1 with a release that is due (due_releases.sql), which this transaction locks, and whether it has
-- several shards. Releases taken by others are skipped.
SELECT sale_id, coalesce((SELECT shards > 1 FROM sales WHERE id = sale_id), false) AS sharded
FROM releases
WHERE (again_at <= now() OR again_at > now() + interval '1 minute') AND sale_id = ANY ($1::uuid[])
ORDER BY again_at
LIMIT 1
FOR UPDATE SKIP LOCKED
