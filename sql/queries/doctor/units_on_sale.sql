-- The sales that have not ended, with their partitions, their shards and their units without those of live orders:
-- all, or only the sale $1 unless it is null. The sale $1 is also returned if it has ended, without units. Entries of draws
-- and places in waiting lists are no stock: nobody expects that many.
SELECT id, partitions, shards, CASE WHEN on_sale AND NOT EXISTS (SELECT FROM draws WHERE entries_id = sales.id) THEN stock - sold ELSE 0 END AS units
FROM sales CROSS JOIN LATERAL (SELECT state <> 'ended' AND (closes_at IS NULL OR closes_at > now())) AS known (on_sale)
WHERE CASE WHEN $1::uuid IS NULL THEN on_sale ELSE id = $1 END
