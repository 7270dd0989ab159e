-- Keeps the report of a payment, with what was decided about it. The transaction has locked the order.
-- $1 reference, $2 the order that it names or NULL, $3 its sale, NULL if the order is not known yet
-- $4 amount and $5 currency, or NULL, $6 other data
-- $7 the type of the event that decides, or NULL to wait for the order, $8 why a refund is due, or NULL
--
-- Returns false if the reference was reported before, also in a concurrent transaction, which it waits for: nothing was changed.
WITH received AS (
    INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, data)
    VALUES ($1, 1, 'PaymentReceived', $2, $3, $4, $5, $6)
    ON CONFLICT (reference, version) DO NOTHING
    RETURNING reference, order_id, sale_id, amount, currency, data
), decided AS (
    INSERT INTO payment_events (reference, version, type, order_id, sale_id, amount, currency, reason, data)
    SELECT reference, 2, $7, order_id, sale_id, amount, currency, $8, data FROM received WHERE $7::text IS NOT NULL
)
SELECT count(*) > 0 FROM received
