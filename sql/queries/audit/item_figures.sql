-- The figures of the items of the audited sales, one row each, in Postgres and in Redis: there the sums of all shards.
-- Units that one shard has given and another has not got yet are available.
CREATE TEMP TABLE audit_item_figures AS
WITH projected AS (
    SELECT o.sale_id, l.item, sum(l.units) AS live_units, coalesce(sum(l.units) FILTER (WHERE o.status = 'confirmed'), 0) AS confirmed_units
    FROM audit_sales AS s JOIN orders AS o USING (sale_id) CROSS JOIN LATERAL order_lines(o.lines) AS l
    WHERE s.items > 0 AND is_live(o.status) GROUP BY 1, 2
), bought AS (
    SELECT b.sale_id, l.item, sum(l.units) AS taken, coalesce(sum(l.units) FILTER (WHERE o.id IS NULL OR r.order_id IS NOT NULL), 0) AS held
    FROM audit_sales AS s JOIN audit_buyers AS b USING (sale_id) CROSS JOIN LATERAL order_lines(b.lines) AS l
    LEFT JOIN orders AS o ON o.sale_id = b.sale_id AND o.id = b.order_id LEFT JOIN releases AS r ON r.order_id = b.order_id
    WHERE s.items > 0 GROUP BY 1, 2
), logged AS (
    SELECT e.sale_id, l.item, sum(CASE type WHEN 'OrderConfirmed' THEN l.units WHEN 'OrderCancelled' THEN -l.units WHEN 'OrderExpired' THEN -l.units END) AS replayed_units
    FROM audit_sales AS s JOIN order_events AS e USING (sale_id) CROSS JOIN LATERAL order_lines(e.lines) AS l
    WHERE s.items > 0 GROUP BY 1, 2
), found AS (
    SELECT sale_id, bool_and(present AND epoch > 0) AS present, bool_and(still) AS still, bool_or(changing) AS changing
    FROM audit_shard_figures GROUP BY sale_id
), inside AS (
    SELECT sale_id, item, sum(units::numeric + on_the_way) AS units, sum(stock::numeric + on_the_way) AS redis_stock FROM audit_items GROUP BY 1, 2
)
SELECT i.sale_id, i.item, i.code, i.stock, i.sold, i.per_order_limit, coalesce(p.live_units, 0) AS live_units,
       CASE WHEN s.payment_window_seconds > 0 THEN coalesce(p.confirmed_units, 0) ELSE 0 END AS unpaid, coalesce(l.replayed_units, 0) AS replayed_units,
       f.present, f.still, f.changing, a.units, a.redis_stock,
       coalesce(b.taken, 0) AS taken, coalesce(b.held, 0) AS held
FROM sale_items AS i JOIN sales AS s ON s.id = i.sale_id JOIN found AS f USING (sale_id) LEFT JOIN inside AS a USING (sale_id, item)
LEFT JOIN projected AS p USING (sale_id, item) LEFT JOIN bought AS b USING (sale_id, item) LEFT JOIN logged AS l USING (sale_id, item)
