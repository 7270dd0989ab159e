-- Deletes the next $3 orders of the archived sale $1 with an id above $2, each with all of its events and those of
-- its payments. The ranges go
-- forward, so that no call reads again what an earlier one has deleted.
--
-- Returns: the id of the last one; no row if there is none.
WITH upto AS MATERIALIZED (
    SELECT id FROM (SELECT id FROM orders WHERE sale_id = $1 AND id > $2 ORDER BY id LIMIT $3) AS next ORDER BY id DESC LIMIT 1
), events AS (
    DELETE FROM order_events WHERE sale_id = $1 AND order_id > $2 AND order_id <= (SELECT id FROM upto)
), money AS (
    DELETE FROM payment_events WHERE reference IN (
        SELECT reference FROM payment_events WHERE order_id > $2 AND order_id <= (SELECT id FROM upto) AND sale_id = $1)
), rows AS (
    DELETE FROM orders WHERE sale_id = $1 AND id > $2 AND id <= (SELECT id FROM upto)
)
SELECT id FROM upto
