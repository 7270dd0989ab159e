-- Deletes the events of the archived sale $1 that have no order. There are none, unless rows were deleted manually.
DELETE FROM order_events WHERE sale_id = $1
