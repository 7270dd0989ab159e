-- S4: the sale's counter, its orders and its events disagree.
SELECT sale_id, NULL::uuid AS order_id, NULL AS user_id,
       format('sold is %s, the live orders hold %s units, and the events come to %s', sold, live_units, replayed_units) AS what,
       CASE WHEN live_units <> replayed_units THEN 'projections' ELSE 'recount' END AS remedy,
       format('%s %s', sold - live_units, sold - replayed_units) AS same
FROM audit_figures
WHERE sold <> live_units OR sold <> replayed_units
