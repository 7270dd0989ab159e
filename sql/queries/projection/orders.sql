-- How many orders the log has.
-- $1, $2 the sales from $1 to before $2
SELECT count(*) FROM order_events WHERE sale_id >= $1 AND sale_id < $2 AND version = 2
