-- Sales that Redis must have, with an id above $1, by id, at most $2; ended ones only if $3. A sale ends by its
-- operators or at its closing time. Those whose orders are archived are left out.
SELECT id, partitions, shards, epoch, last_sequence, revision, published_revision, ended, retired_at IS NOT NULL AS retired,
       state = 'open' AND coalesce(opens_at <= now(), true) AND NOT ended AS open
FROM sales CROSS JOIN LATERAL (SELECT state = 'ended' OR coalesce(closes_at <= now(), false)) AS known (ended)
WHERE id > $1 AND archived_at IS NULL AND ($3 OR NOT ended)
ORDER BY id LIMIT $2
