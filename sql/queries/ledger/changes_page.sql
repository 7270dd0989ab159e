-- The position of the event that is $3 rows after the first one behind the position $1, up to $2; none if there are not so
-- many. Positions may have gaps of any size: a restore or a replication sets their sequence ahead.
SELECT position FROM order_events WHERE position > $1 AND position <= $2 ORDER BY position OFFSET $3 LIMIT 1
