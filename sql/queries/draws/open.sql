-- The sales whose units are offered: of draws, or by $1 of waiting lists, with the layout of each. unfinished is true if
-- they are due whatever is left: offers may have been lost with Redis, or the sale has ended and its list has not. closed is
-- true for a waiting list that nobody can join.
SELECT d.sale_id, g.partitions, g.shards, g.items, d.offers_epoch < g.epoch OR g.state = 'ended' AS unfinished, e.state = 'ended' AS closed
FROM draws AS d JOIN sales AS e ON e.id = d.entries_id JOIN sales AS g ON g.id = d.sale_id
WHERE d.kind = $1 AND CASE $1
    WHEN 'draw' THEN g.offers_only AND d.voided_at IS NULL AND d.ranked_at IS NOT NULL AND g.state <> 'ended' AND (g.closes_at <= now()) IS NOT TRUE
    ELSE (e.state <> 'ended' OR g.state <> 'ended') AND (g.closes_at <= now()) IS NOT TRUE END
