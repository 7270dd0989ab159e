-- Records that the orders of the sale $1 are in the file $2, if nothing has changed since it was written: the sale's
-- revision is $3, and it has $4 events and $5 events of payments, the last one at position $6. The caller has locked the sale in
-- a statement of its own (lock_sale.sql). Whoever changes an order after that fails when it counts the units
-- (ledger/return_sold.sql), or does not find it.
WITH money AS (
    SELECT count(*) AS events, max(position) AS last FROM payment_events WHERE reference IN (SELECT reference FROM payment_events WHERE sale_id = $1)
)
UPDATE sales SET archived_at = now(), archive = $2
WHERE id = $1 AND archived_at IS NULL AND revision = $3
  AND (SELECT count(*) = $4 AND (SELECT events FROM money) = $5 AND greatest(max(position), (SELECT last FROM money), 0) = $6
       FROM order_events WHERE sale_id = $1)
