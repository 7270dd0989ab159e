-- At most $1 sales, as find_sales.sql returns them without final units. First come those where something happens: among
-- the newest 1000 events of orders of the last five minutes, with unpaid orders or open payments, or in $2. If they are
-- more than $1, those with the most events count. Then come open, paused, scheduled and ended sales; each the newest
-- first. Retired sales, which are most of those that are over, are found by the primary key, and unpaid orders and open
-- payments sale by sale.
WITH RECURSIVE unpaid (n, sale_id) AS (
    (SELECT 1, sale_id FROM orders WHERE status = 'confirmed' AND due IS NOT NULL ORDER BY sale_id DESC LIMIT 1)
    UNION ALL
    SELECT n + 1, (SELECT o.sale_id FROM orders AS o WHERE o.status = 'confirmed' AND o.due IS NOT NULL AND o.sale_id < unpaid.sale_id ORDER BY o.sale_id DESC LIMIT 1)
    FROM unpaid WHERE sale_id IS NOT NULL AND n < $1
), owing (n, sale_id) AS (
    (SELECT 1, sale_id FROM open_payments WHERE sale_id IS NOT NULL ORDER BY sale_id DESC LIMIT 1)
    UNION ALL
    SELECT n + 1, (SELECT p.sale_id FROM open_payments AS p WHERE p.sale_id < owing.sale_id ORDER BY p.sale_id DESC LIMIT 1)
    FROM owing WHERE sale_id IS NOT NULL AND n < $1
), active AS (
    SELECT sale_id AS id, sum(events) AS events FROM (
        SELECT sale_id, 1 AS events FROM (SELECT sale_id, occurred_at FROM order_events ORDER BY position DESC LIMIT 1000) AS newest
        WHERE occurred_at > now() - interval '5 minutes'
        UNION ALL SELECT sale_id, 0 FROM unpaid
        UNION ALL SELECT sale_id, 0 FROM owing
        UNION ALL SELECT unnest($2::uuid[]), 0
    ) AS each WHERE sale_id IS NOT NULL GROUP BY sale_id ORDER BY events DESC, sale_id DESC LIMIT $1
)
SELECT {{columns/stored_sale}}, 0::bigint AS waiting, 0::bigint AS final
FROM (
    (SELECT *, id IN (SELECT id FROM active) AS happens, CASE WHEN state = 'ended' OR closes_at <= now() THEN 4 WHEN state = 'paused' THEN 2 WHEN opens_at > now() THEN 3 ELSE 1 END AS rank
     FROM sales WHERE retired_at IS NULL ORDER BY happens DESC, rank, id DESC LIMIT $1)
    UNION ALL
    (SELECT *, true, 4 FROM sales WHERE retired_at IS NOT NULL AND id IN (SELECT id FROM active))
    UNION ALL
    (SELECT *, false, 4 FROM sales WHERE retired_at IS NOT NULL AND id NOT IN (SELECT id FROM active) ORDER BY id DESC LIMIT $1)
) AS s
ORDER BY happens DESC, rank, s.id DESC
LIMIT $1
