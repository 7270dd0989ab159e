-- Sales that have been over for $1 seconds, whose changes are all published, and whose buyers are in Redis, oldest
-- first, with the time since when they are; not those of $2. $3 how many at most. A sale ends by its operators or at its
-- closing time.
SELECT id, partitions, shards, epoch, revision, over_at
FROM sales CROSS JOIN LATERAL (
    SELECT least(closes_at, CASE WHEN state = 'ended' THEN (
        SELECT min(occurred_at) FROM sale_events AS e WHERE e.sale_id = sales.id AND e.type = 'SaleEnded') END) AS over_at
) AS known
WHERE retired_at IS NULL AND published_revision = revision AND id <> ALL ($2::uuid[])
  AND over_at <= now() - make_interval(secs => $1)
ORDER BY id LIMIT $3
