-- What the places of the audited sales were divided by: a row for the creation and for each rebuild, of which the first
-- place above upto is given out next.
CREATE TEMP TABLE audit_rebuilds AS
SELECT sale_id, revision,
       -- Up to here places may lack orders, which were lost with Redis.
       upto,
       -- The same before, and the shards that the sale had since.
       coalesce(max(upto) OVER (of_sale ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS since, lag(shards, 1, 1) OVER of_sale AS shards
FROM (
    SELECT e.sale_id, e.revision, CASE WHEN type = 'SaleRebuilt' AND data ->> 'sequence' ~ '^\d{1,15}$' THEN (data ->> 'sequence')::bigint ELSE 0 END AS upto,
           CASE WHEN data ->> 'shards' ~ '^[1-9]\d?$' THEN (data ->> 'shards')::integer ELSE 1 END AS shards
    FROM sale_events AS e JOIN audit_sales USING (sale_id) WHERE type IN ('SaleCreated', 'SaleWithItemsCreated', 'SaleRebuilt')
) AS known
WINDOW of_sale AS (PARTITION BY sale_id ORDER BY revision)
