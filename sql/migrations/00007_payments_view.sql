-- +goose Up
-- contract: the view names the states that payments have now, and sale_in_use finds open payments without reading all
CREATE TABLE IF NOT EXISTS schema_contracts (
    migration bigint PRIMARY KEY, works_from bigint NOT NULL, release text NOT NULL);
INSERT INTO schema_contracts (migration, works_from, release) VALUES (7, 1, 'v0.1.0');

SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

SET LOCAL lock_timeout = '3s';

-- The present state of each payment.
CREATE OR REPLACE VIEW payments AS
SELECT e.reference, e.version, e.position, e.order_id, e.sale_id, e.amount, e.currency,
       CASE e.type WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentSettled' THEN 'settled' WHEN 'PaymentRefundDue' THEN 'refund_due'
                   WHEN 'PaymentRefunded' THEN 'refunded' WHEN 'PaymentUnclear' THEN 'unclear' WHEN 'PaymentDismissed' THEN 'dismissed'
                   WHEN 'PaymentDisputed' THEN 'disputed' ELSE 'claimed' END AS state,
       e.reason, (SELECT occurred_at FROM payment_events AS first WHERE first.reference = e.reference AND first.version = 1) AS received_at,
       e.occurred_at AS updated_at, e.data
FROM payment_events AS e
WHERE NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1);

-- What still needs the orders of a sale: it keeps them in Postgres.
CREATE OR REPLACE FUNCTION sale_in_use(sale uuid) RETURNS TABLE (reason text) LANGUAGE sql STABLE AS $$
    SELECT reason FROM open_sale(sale)
UNION ALL
    SELECT 'its buyers are still in Redis: a worker removes them when nothing of the sale is open, --retire-after after its end'
    FROM sales WHERE id = sale AND retired_at IS NULL
UNION ALL
    (SELECT format('the payment %s is %s', reference, CASE state WHEN 'refund_due' THEN 'due for refund' ELSE state END) FROM open_payments WHERE sale_id = sale LIMIT 1)
UNION ALL
    SELECT format('the target %s of the relay has not read it: it is at position %s, and the last event of the sale at %s',
                  t.name, t.position, last.position)
    FROM (SELECT greatest((SELECT max(position) FROM order_events WHERE sale_id = sale),
                          (SELECT max(position) FROM sale_events WHERE sale_id = sale),
                          (SELECT max(position) FROM payment_events WHERE sale_id = sale)) AS position) AS last
    JOIN relay_targets AS t ON t.position < last.position
$$;

-- +goose Down
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
CREATE OR REPLACE VIEW payments AS
SELECT e.reference, e.version, e.position, e.order_id, e.sale_id, e.amount, e.currency,
       CASE e.type WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentSettled' THEN 'settled'
                   WHEN 'PaymentRefundDue' THEN 'refund_due' ELSE 'refunded' END AS state,
       e.reason, (SELECT occurred_at FROM payment_events AS first WHERE first.reference = e.reference AND first.version = 1) AS received_at,
       e.occurred_at AS updated_at, e.data
FROM payment_events AS e
WHERE NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1);
CREATE OR REPLACE FUNCTION sale_in_use(sale uuid) RETURNS TABLE (reason text) LANGUAGE sql STABLE AS $$
    SELECT reason FROM open_sale(sale)
UNION ALL
    SELECT 'its buyers are still in Redis: a worker removes them when nothing of the sale is open, --retire-after after its end'
    FROM sales WHERE id = sale AND retired_at IS NULL
UNION ALL
    (SELECT format('the payment %s is due for refund', reference) FROM payments WHERE sale_id = sale AND state = 'refund_due' LIMIT 1)
UNION ALL
    SELECT format('the target %s of the relay has not read it: it is at position %s, and the last event of the sale at %s',
                  t.name, t.position, last.position)
    FROM (SELECT greatest((SELECT max(position) FROM order_events WHERE sale_id = sale),
                          (SELECT max(position) FROM sale_events WHERE sale_id = sale),
                          (SELECT max(position) FROM payment_events WHERE sale_id = sale)) AS position) AS last
    JOIN relay_targets AS t ON t.position < last.position
$$;
DELETE FROM schema_contracts WHERE migration = 7;
