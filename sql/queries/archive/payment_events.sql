-- The events of the payments of the sale $1 in the order of the file, with the columns of its header. The first ones of a payment
-- may have no sale yet.
SELECT * FROM payment_events WHERE reference IN (SELECT reference FROM payment_events WHERE sale_id = $1) ORDER BY reference, version
