-- Sales that have been over for $1 seconds, whose changes are all published, and whose buyers are in Redis, oldest
-- first; not those of $2. $3 how many at most. A sale ends by its operators or at its closing time.
SELECT id, partitions, shards, epoch, revision
FROM sales
WHERE retired_at IS NULL AND published_revision = revision AND id <> ALL ($2::uuid[])
  AND (closes_at <= now() - make_interval(secs => $1)
       OR state = 'ended' AND EXISTS (
           SELECT FROM sale_events AS e
           WHERE e.sale_id = sales.id AND e.type = 'SaleEnded' AND e.occurred_at <= now() - make_interval(secs => $1)))
ORDER BY id LIMIT $3
