-- S5: sales whose revision is not that of their log. Their changes cannot be published. Changes
-- before the last rebuild do not matter, because it wrote the whole sale.
SELECT s.id AS sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN s.published_revision NOT BETWEEN 0 AND s.revision THEN format('the sale is at revision %s, and its published revision is %s', s.revision, s.published_revision)
            WHEN coalesce(log.last, 0) <> s.revision THEN format('the sale is at revision %s, and its log ends with revision %s', s.revision, coalesce(log.last, 0))
            ELSE format('the log of the sale has %s events from revision %s to %s', log.events, log.first, log.last)
       END AS what,
       'rebuild' AS remedy
FROM sales AS s JOIN audit_sales AS a ON a.sale_id = s.id
CROSS JOIN LATERAL (SELECT coalesce(max(revision), 1) AS since FROM sale_events WHERE sale_id = s.id AND type = 'SaleRebuilt') AS rebuilt
CROSS JOIN LATERAL (SELECT count(*) AS events, min(revision) AS first, max(revision) AS last FROM sale_events WHERE sale_id = s.id AND revision >= rebuilt.since) AS log
WHERE s.published_revision NOT BETWEEN 0 AND s.revision
   OR log.last IS DISTINCT FROM s.revision OR log.first <> rebuilt.since OR log.events <> s.revision - rebuilt.since + 1
UNION ALL
-- A change of an unknown type blocks all later ones. A rebuild would skip it and its effect.
SELECT e.sale_id, NULL, NULL, format('revision %s of the sale is a %s, which this version does not know: no later change is sent to Redis', e.revision, e.type), 'operator'
FROM sale_events AS e JOIN sales AS s ON s.id = e.sale_id JOIN audit_sales AS a ON a.sale_id = s.id
WHERE e.revision > s.published_revision AND e.revision <= s.revision
  AND e.type NOT IN ('SaleCreated', 'SaleWithItemsCreated', 'SalePaused', 'SaleResumed', 'SaleEnded', 'SaleRestocked', 'SaleRebuilt', 'SaleLowering', 'SaleReconciled', 'SaleRetired', 'SaleRenamed',
                     'DrawCreated', 'DrawFrozen', 'DrawSeeded', 'DrawVoided', 'DrawOpening', 'DrawOpened', 'WaitlistCreated', 'WaitlistClosed')
