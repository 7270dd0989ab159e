-- +goose Up

SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The payments that somebody has to do something about, one row each: the log (payment_events) grows for ever, and these are few. A
-- row leaves when its payment is settled, refunded or dismissed. The trigger below keeps it, whoever writes the log.
CREATE TABLE open_payments (
    reference text COLLATE "C" PRIMARY KEY,
    -- waiting (for its order), refund_due, unclear or disputed.
    state     text NOT NULL,
    -- The version, the position and the time of its latest event; the rest is that event's.
    version   integer NOT NULL,
    position  bigint NOT NULL,
    since     timestamptz NOT NULL,
    order_id  uuid,
    sale_id   uuid,
    amount    bigint,
    currency  text
);

CREATE INDEX open_payments_position ON open_payments (state, position);
CREATE INDEX open_payments_of_sale ON open_payments (sale_id, state, position);
-- An order with money that waits does not expire.
CREATE INDEX open_payments_waiting ON open_payments (order_id) WHERE state = 'waiting';
-- The refunds that are due in each currency are counted without their rows.
CREATE INDEX open_payments_due ON open_payments (currency, position) INCLUDE (amount) WHERE state = 'refund_due';

-- The state that an event brings a payment to; NULL if nothing is left to do.
CREATE FUNCTION open_payment(type text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE type WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentRefundDue' THEN 'refund_due'
                     WHEN 'PaymentUnclear' THEN 'unclear' WHEN 'PaymentDisputed' THEN 'disputed' END
$$;

-- SECURITY DEFINER, because who writes the log needs no right to the table.
-- +goose StatementBegin
CREATE FUNCTION note_open_payments() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    WITH latest AS (
        SELECT DISTINCT ON (reference) *, open_payment(type) AS state FROM added ORDER BY reference, version DESC
    ), closed AS (
        DELETE FROM open_payments AS o USING latest WHERE o.reference = latest.reference AND latest.state IS NULL
    )
    INSERT INTO open_payments AS o (reference, state, version, position, since, order_id, sale_id, amount, currency)
    SELECT reference, state, version, position, occurred_at, order_id, sale_id, amount, currency FROM latest WHERE state IS NOT NULL
    ON CONFLICT (reference) DO UPDATE
    SET state = excluded.state, version = excluded.version, position = excluded.position, since = excluded.since,
        order_id = excluded.order_id, sale_id = excluded.sale_id, amount = excluded.amount, currency = excluded.currency
    WHERE o.version < excluded.version;
    RETURN NULL;
END
$$;
-- +goose StatementEnd
REVOKE EXECUTE ON FUNCTION note_open_payments() FROM PUBLIC;

SET LOCAL lock_timeout = '3s';
CREATE TRIGGER note_open_payments AFTER INSERT ON payment_events
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION note_open_payments();

-- Nobody reports a payment until this is committed: it reads the two indexes of payments that may be open, once.
INSERT INTO open_payments (reference, state, version, position, since, order_id, sale_id, amount, currency)
SELECT reference, open_payment(type), version, position, occurred_at, order_id, sale_id, amount, currency
FROM payment_events AS e
WHERE (type = 'PaymentReceived' AND sale_id IS NULL OR type = 'PaymentRefundDue')
  AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1);

-- +goose Down
DROP TRIGGER note_open_payments ON payment_events;
DROP FUNCTION note_open_payments(), open_payment(text);
DROP TABLE open_payments;
