-- Records that the orders of the sale $1 are in the file $2, if nothing has changed since it was written: the sale's
-- revision is $3, and it has $4 events, the last one at position $5. The caller has locked the sale in a statement of
-- its own. Whoever changes an order after that fails when it counts the units (ledger/return_sold.sql).
UPDATE sales SET archived_at = now(), archive = $2
WHERE id = $1 AND archived_at IS NULL AND revision = $3
  AND (SELECT count(*) = $4 AND coalesce(max(position), 0) = $5 FROM order_events WHERE sale_id = $1)
