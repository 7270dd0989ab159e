-- Checks the promises for the sale of a file, whose events are in file_events and file_payments. The caller puts projection/replay.sql
-- where the braces are.
-- $1 sale, $2 its stock, $3 its units sold, $4 the rows of its items as JSON, NULL without any
--
-- Returns: the promise, an order or NULL, and what is wrong.
WITH replayed AS (
{{replay}}
), live AS (
    SELECT * FROM replayed WHERE is_live(status)
), money AS (
    SELECT DISTINCT ON (reference) * FROM file_payments ORDER BY reference, version DESC
), sums AS (
    SELECT coalesce(sum(quantity), 0) AS units FROM live
), items AS (
    SELECT code, stock, sold, (SELECT coalesce(sum(l.units), 0) FROM live CROSS JOIN order_lines(lines) AS l WHERE l.item = i.item) AS units
    FROM jsonb_populate_recordset(NULL::sale_items, $4) AS i
)
SELECT 'S1' AS promise, NULL::uuid AS order_id, format('%s units are sold of a stock of %s', greatest(units, $3::bigint), $2::bigint) AS what
FROM sums WHERE greatest(units, $3::bigint) > $2::bigint
UNION ALL
SELECT 'S1', NULL, format('%s units of the item %s are sold of a stock of %s', greatest(units, sold), code, stock) FROM items WHERE greatest(units, sold) > stock
UNION ALL
SELECT 'S2', min(id::text)::uuid, format('the user %s has %s live orders', user_id, count(*)) FROM live GROUP BY user_id HAVING count(*) > 1
UNION ALL
SELECT 'S3', id, 'the order awaits payment' FROM live WHERE status = 'confirmed' AND due IS NOT NULL
UNION ALL
SELECT 'S4', NULL, format('sold is %s, and the live orders hold %s units', $3::bigint, units) FROM sums WHERE units <> $3::bigint
UNION ALL
SELECT 'S4', NULL, format('sold of the item %s is %s, and the live orders hold %s units', code, sold, units) FROM items WHERE units <> sold
UNION ALL
SELECT 'S5', id, damage FROM replayed WHERE damage IS NOT NULL
UNION ALL
SELECT 'S5', order_id, format('the log of the order has version %s %s times', version, count(*)) FROM file_events GROUP BY order_id, version HAVING count(*) > 1
UNION ALL
SELECT 'S5', order_id, 'an event is of another sale' FROM file_events WHERE sale_id <> $1::uuid
UNION ALL
SELECT 'S8', order_id, format('the payment %s is not settled or refunded: %s', left(reference, 100), type) FROM money WHERE type NOT IN ('PaymentSettled', 'PaymentRefunded', 'PaymentDismissed', 'PaymentClaimed')
UNION ALL
SELECT 'S8', coalesce(id, order_id), format('the order is paid with the reference %s, and the payment %s settled it', payment_reference, coalesce(left(reference, 100), 'none'))
FROM (SELECT * FROM live WHERE status = 'paid') AS paid FULL JOIN (
    -- Money may have gone back outside of Stampede, and the order stays paid.
    SELECT * FROM money WHERE type = 'PaymentSettled' OR reason = 'refunded-outside' AND EXISTS (
        SELECT FROM live WHERE status = 'paid' AND id = order_id AND reference IN (payment_reference, concat(id, ':', payment_reference)))
) AS settled ON order_id = id
WHERE (reference IN (payment_reference, concat(id, ':', payment_reference))) IS NOT TRUE
UNION ALL
SELECT 'S8', NULL, format('the log of the payment %s has %s of the versions from 1 to %s', left(reference, 100), count(*), max(version))
FROM file_payments GROUP BY reference HAVING min(version) <> 1 OR max(version) <> count(*)
