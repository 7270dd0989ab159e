-- The payments of the sale $1 are in payment_events again.
DELETE FROM archived_payments WHERE sale_id = $1
