-- Deletes the events of the archived sale $1 that have no order. There are none, unless rows were deleted manually.
WITH money AS (
    DELETE FROM payment_events WHERE reference IN (SELECT reference FROM payment_events WHERE sale_id = $1)
)
DELETE FROM order_events WHERE sale_id = $1
