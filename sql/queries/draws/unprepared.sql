-- The sales that are drawn whose entries are over and not ranked, and which are not over themselves: first those that must
-- be frozen soonest, because a draw that is frozen late is void. One that waits for its round has nothing to do.
SELECT d.sale_id
FROM draws AS d JOIN sales AS e ON e.id = d.entries_id JOIN sales AS g ON g.id = d.sale_id
WHERE d.kind = 'draw' AND d.voided_at IS NULL AND d.ranked_at IS NULL
  AND (d.round IS NULL OR d.seeded_at IS NOT NULL)
  AND e.closes_at <= now() AND g.state <> 'ended' AND (g.closes_at <= now()) IS NOT TRUE
ORDER BY d.frozen_at IS NOT NULL AND (d.round IS NOT NULL OR d.parties IS NOT NULL), e.closes_at + make_interval(secs => d.freeze_seconds), d.sale_id
