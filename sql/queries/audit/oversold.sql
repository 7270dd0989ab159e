-- S1: more units are sold than there are, in Postgres or in Redis.
SELECT f.sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN low.units < 0 OR present AND available < 0 THEN format('%sRedis has %s units left', low.label, coalesce(low.units, available))
            ELSE format('%s units are sold of a stock of %s', greatest(sold, live_units), stock) END AS what,
       CASE WHEN low.units < 0 OR present AND available < 0 THEN 'rebuild' WHEN live_units <= stock THEN 'recount' ELSE 'operator' END AS remedy
FROM audit_figures AS f
LEFT JOIN LATERAL (SELECT label, units FROM audit_shards WHERE sale_id = f.sale_id AND units < 0 ORDER BY shard LIMIT 1) AS low ON true
WHERE greatest(sold, live_units) > stock OR low.units < 0 OR available < 0
UNION ALL
SELECT sale_id, NULL, NULL,
       CASE WHEN low.units < 0 OR f.units < 0 THEN format('%sRedis has %s units of the item %s left', low.label, coalesce(low.units, f.units), code)
            ELSE format('%s units of the item %s are sold of a stock of %s', greatest(sold, live_units), code, stock) END,
       CASE WHEN low.units < 0 OR f.units < 0 THEN 'rebuild' WHEN live_units <= stock THEN 'recount' ELSE 'operator' END
FROM audit_item_figures AS f
LEFT JOIN LATERAL (SELECT label, i.units FROM audit_items AS i JOIN audit_shards USING (sale_id, shard)
                   WHERE i.sale_id = f.sale_id AND i.item = f.item AND i.units < 0 ORDER BY shard LIMIT 1) AS low ON true
WHERE greatest(sold, live_units) > stock OR low.units < 0 OR f.units < 0
