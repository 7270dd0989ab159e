-- Takes the oldest $1 changes of orders.
DELETE FROM order_changes WHERE position IN (SELECT position FROM order_changes ORDER BY position LIMIT $1)
RETURNING order_id
