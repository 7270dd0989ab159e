-- The figures of figures.sql, as far as a report shows them and a bigint holds them.
SELECT sale_id, name, CASE WHEN shards > 1 THEN shards ELSE 0 END AS shards, stock, sold, orders, live_orders,
       least(greatest(live_units, -9e18), 9e18)::bigint AS live_units, least(greatest(unpaid, -9e18), 9e18)::bigint AS unpaid_units,
       rejected, voided, lost, events,
       least(greatest(replayed_units, -9e18), 9e18)::bigint AS replayed_units, buyers, present AS in_redis,
       EXISTS (SELECT FROM draws AS d WHERE d.entries_id = audit_figures.sale_id) AS entries,
       least(greatest(available, -9e18), 9e18)::bigint AS available, greatest(on_the_way, 0) AS on_the_way, least(greatest(held, -9e18), 9e18)::bigint AS held, places,
       (SELECT jsonb_agg(jsonb_build_object('code', code, 'stock', i.stock, 'available', CASE WHEN i.present THEN i.units ELSE 0 END,
                                            'held', least(i.held + i.unpaid, 9e18)::bigint, 'sold', greatest(i.sold - i.unpaid, -9e18)::bigint) ORDER BY item < 'a', item)
        FROM audit_item_figures AS i WHERE i.sale_id = audit_figures.sale_id) AS items
FROM audit_figures
ORDER BY sale_id
