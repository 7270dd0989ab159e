-- S4: stock = available + held + sold. Without the sale in Redis the available units are unknown. Units that one shard
-- has given and another has not got yet are available.
--
-- In texts, as in the API, confirmed orders that await payment count as held, not as sold.
--
-- If Redis alone is inconsistent, its stock has to be rebuilt. Otherwise the difference comes from
-- other findings, or from units in transit.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN NOT present THEN format('Redis does not have %s, so its units cannot be accounted for', CASE shards WHEN 1 THEN 'the sale' ELSE 'all shards of the sale' END)
            WHEN redis_stock <> stock THEN format('the stock is %s in Postgres and %s in Redis', stock, redis_stock)
            WHEN stock > available + held + sold THEN
                format('%s of %s units %s missing: %s available, %s held, %s sold', stock - available - held - sold, stock,
                       CASE stock - available - held - sold WHEN 1 THEN 'is' ELSE 'are' END, available, held + unpaid, sold - unpaid)
            ELSE format('%s too many for a stock of %s: %s available, %s held, %s sold',
                        CASE available + held + sold - stock WHEN 1 THEN '1 unit' ELSE format('%s units', available + held + sold - stock) END, stock, available, held + unpaid, sold - unpaid)
       END AS what,
       CASE WHEN NOT present AND published_revision = 0 THEN 'worker'
            WHEN NOT present THEN 'rebuild'
            WHEN redis_stock <> stock AND changing THEN 'worker'
            WHEN redis_stock <> stock OR still AND available + taken <> redis_stock THEN 'rebuild'
            ELSE '' END AS remedy,
       -- The sold units change during a sale; the difference does not.
       CASE WHEN redis_stock <> stock THEN format('stocks %s %s', redis_stock, stock) ELSE format('off by %s', redis_stock - available - taken) END AS same
FROM audit_figures
WHERE NOT present AND NOT gone OR redis_stock <> stock OR stock <> available + held + sold
UNION ALL
-- A shard's share is what is left in it and what its buyers hold. Units that move change the shares of both shards.
SELECT sale_id, NULL, NULL, format('%sits share of the stock is %s: %s left, %s taken', label, stock, units, taken), 'rebuild',
       format('%soff by %s', label, stock - units - taken)
FROM audit_shard_figures
WHERE shards > 1 AND still AND epoch > 0 AND stock <> units + taken
UNION ALL
SELECT sale_id, NULL, NULL,
       CASE WHEN redis_stock <> stock THEN format('the stock of the item %s is %s in Postgres and %s in Redis', code, stock, redis_stock)
            ELSE format('the item %s has %s units available, %s held and %s sold of a stock of %s', code, units, held + unpaid, sold - unpaid, stock) END,
       CASE WHEN redis_stock <> stock AND changing THEN 'worker'
            WHEN redis_stock <> stock OR still AND units + taken <> redis_stock THEN 'rebuild'
            ELSE '' END,
       CASE WHEN redis_stock <> stock THEN format('stocks of %s: %s %s', code, redis_stock, stock) ELSE format('%s off by %s', code, redis_stock - units - taken) END
FROM audit_item_figures WHERE present AND (redis_stock <> stock OR stock <> units + held + sold)
UNION ALL
-- The same of each item.
SELECT a.sale_id, NULL, NULL, format('%sits share of the item %s is %s: %s left, %s taken', f.label, i.code, a.stock, a.units, coalesce(b.taken, 0)), 'rebuild',
       format('%soff by %s of %s', f.label, a.stock - a.units - coalesce(b.taken, 0), i.code)
FROM audit_items AS a JOIN audit_shard_figures AS f USING (sale_id, shard) JOIN sale_items AS i USING (sale_id, item)
LEFT JOIN (SELECT sale_id, shard, l.item, sum(l.units) AS taken FROM audit_sales AS s JOIN audit_buyers AS b USING (sale_id) CROSS JOIN LATERAL order_lines(b.lines) AS l
           WHERE s.items > 0 GROUP BY 1, 2, 3) AS b USING (sale_id, shard, item)
WHERE f.shards > 1 AND f.still AND f.epoch > 0 AND a.stock <> a.units + coalesce(b.taken, 0)
UNION ALL
SELECT sale_id, NULL, NULL, format('%sRedis has %s of %s units left, and %s of %s of all items together', a.label, a.units, a.stock, i.units, i.stock), 'rebuild',
       format('%sitems off by %s', a.label, i.units - a.units)
FROM audit_shards AS a JOIN (SELECT sale_id, shard, sum(units) AS units, sum(stock) AS stock FROM audit_items GROUP BY sale_id, shard) AS i USING (sale_id, shard)
WHERE a.epoch > 0 AND (a.units, a.stock) <> (i.units, i.stock)
