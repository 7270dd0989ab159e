-- Takes the oldest $1 notes of changed orders.
DELETE FROM order_changes WHERE position IN (SELECT position FROM order_changes ORDER BY position LIMIT $1)
RETURNING order_id
