-- The sales of which releases are due, with their partitions and shards. It skips from sale to sale in releases_of_sale: one of
-- them may have very many releases. No release waits for more than a minute: a later time is from before the clock was set
-- back.
WITH RECURSIVE known AS (
    (SELECT sale_id FROM releases ORDER BY sale_id LIMIT 1)
    UNION ALL
    SELECT (SELECT sale_id FROM releases WHERE sale_id > known.sale_id ORDER BY sale_id LIMIT 1)
    FROM known WHERE known.sale_id IS NOT NULL
)
SELECT known.sale_id, coalesce(sales.partitions, 1) AS partitions, coalesce(sales.shards, 1) AS shards
FROM known LEFT JOIN sales ON sales.id = known.sale_id
WHERE known.sale_id IS NOT NULL
  AND EXISTS (SELECT FROM releases WHERE releases.sale_id = known.sale_id AND (again_at <= now() OR again_at > now() + interval '1 minute'))
