-- The position of the event with the version $2 of the payment $1; none if it came from another database, or is the report.
SELECT position FROM payment_events WHERE reference = $1 AND version = $2 AND position > 0 AND type <> 'PaymentReceived'
