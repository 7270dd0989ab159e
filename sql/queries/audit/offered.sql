-- D6: offers and other orders that take more units than there are. An offer without an order in Postgres has its unit in
-- Redis, unless the stock was rebuilt since.
WITH unrecorded AS (
    SELECT o.sale_id, o.item, count(*) AS units
    FROM draw_offers AS o JOIN audit_sales USING (sale_id)
    WHERE o.order_id IS NOT NULL AND NOT EXISTS (SELECT FROM orders WHERE orders.sale_id = o.sale_id AND orders.id = o.order_id)
      AND NOT EXISTS (SELECT FROM sale_events AS r WHERE r.sale_id = o.sale_id AND r.type = 'SaleRebuilt' AND r.occurred_at > o.offered_at)
    GROUP BY o.sale_id, o.item
)
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       format('%s units are sold and %s more are offered, of a stock of %s%s', taken, offered, stock, ' of the item ' || code) AS what, 'draw' AS remedy
FROM (
    SELECT d.sale_id, NULL AS code, f.stock, f.live_units AS taken, coalesce(u.units, 0) AS offered
    FROM draws AS d JOIN audit_figures AS f USING (sale_id) LEFT JOIN (SELECT sale_id, sum(units) AS units FROM unrecorded GROUP BY sale_id) AS u USING (sale_id)
    UNION ALL
    SELECT d.sale_id, f.code, f.stock, f.live_units, coalesce(u.units, 0)
    FROM draws AS d JOIN audit_item_figures AS f USING (sale_id) LEFT JOIN unrecorded AS u ON u.sale_id = d.sale_id AND u.item = f.item
) AS units
WHERE taken + offered > stock
