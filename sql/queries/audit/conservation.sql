-- S4: stock = available + held + sold. Without the sale in Redis the available units are unknown.
--
-- In texts, as in the API, confirmed orders that await payment count as held, not as sold.
--
-- If Redis alone is inconsistent, its stock has to be rebuilt. Otherwise the difference comes from
-- other findings, or from units in transit.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN NOT present THEN 'Redis does not have the sale, so its units cannot be accounted for'
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
