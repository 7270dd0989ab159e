-- S4: the counters of a sale, its orders and its events disagree. The caller puts projection/counted.sql where
-- the braces are.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       CASE WHEN (f.sold, f.sold) IS DISTINCT FROM (coalesce(c.sold, 0), replayed_units) THEN
                format('sold is %s, the live orders hold %s units, and the events come to %s', f.sold, coalesce(c.sold, 0), replayed_units)
            ELSE format('the last place of a confirmed order is %s in the sale, and %s among its orders', s.last_sequence, coalesce(c.last_sequence, 0))
       END AS what,
       CASE WHEN coalesce(c.sold, 0) <> replayed_units THEN 'projections' ELSE 'recount' END AS remedy,
       format('%s %s %s', f.sold - coalesce(c.sold, 0), f.sold - replayed_units, s.last_sequence::numeric - coalesce(c.last_sequence, 0)) AS same
FROM audit_figures AS f JOIN sales AS s ON s.id = f.sale_id LEFT JOIN (
{{counted}}
) AS c USING (sale_id)
WHERE (f.sold, f.sold, s.last_sequence) IS DISTINCT FROM (coalesce(c.sold, 0), replayed_units, coalesce(c.last_sequence, 0))
UNION ALL
SELECT sale_id, NULL, NULL, format('sold of the item %s is %s, the live orders hold %s units, and the events come to %s', code, i.sold, live_units, replayed_units),
       CASE WHEN live_units <> replayed_units THEN 'projections' ELSE 'recount' END,
       format('%s %s %s', code, i.sold - live_units, i.sold - replayed_units)
FROM audit_item_figures AS i WHERE (i.sold, i.sold) <> (live_units, replayed_units)
UNION ALL
SELECT s.id, NULL, NULL, format('sold is %s, and that of all items together %s', s.sold, i.sold), 'recount', format('items %s', s.sold - i.sold)
FROM sales AS s JOIN (SELECT sale_id, sum(sold) AS sold FROM audit_item_figures GROUP BY sale_id) AS i ON i.sale_id = s.id WHERE s.sold <> i.sold
