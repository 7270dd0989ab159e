-- Checks the promises for the sale of a file, whose events are in archived_events.
-- $1 sale, $2 its stock, $3 its units sold
--
-- Returns: the promise, an order or NULL, and what is wrong.
WITH replayed AS (
    SELECT order_id, min(version) AS first, max(version) AS last, count(*) AS events, count(DISTINCT version) AS versions,
           (array_agg(type ORDER BY version DESC))[1] AS last_type,
           (array_agg(user_id ORDER BY version))[1] AS user_id, count(DISTINCT user_id) AS users,
           (array_agg(quantity ORDER BY version))[1] AS quantity, count(DISTINCT quantity) AS quantities,
           (max(data ->> 'sequence') FILTER (WHERE version = 2))::bigint AS place,
           bool_or(data ? 'due') AS payable
    FROM archived_events GROUP BY order_id
), live AS (
    SELECT * FROM replayed WHERE last_type IN ('OrderConfirmed', 'OrderPaid')
), sums AS (
    SELECT coalesce(sum(quantity), 0) AS units FROM live
)
SELECT 'S1' AS promise, NULL::uuid AS order_id, format('%s units are sold of a stock of %s', greatest(units, $3::bigint), $2::bigint) AS what
FROM sums WHERE greatest(units, $3::bigint) > $2::bigint
UNION ALL
SELECT 'S2', min(order_id::text)::uuid, format('the user %s has %s live orders', user_id, count(*)) FROM live GROUP BY user_id HAVING count(*) > 1
UNION ALL
SELECT 'S3', order_id, 'the order awaits payment' FROM live WHERE last_type = 'OrderConfirmed' AND payable
UNION ALL
SELECT 'S4', NULL, format('sold is %s, and the live orders hold %s units', $3::bigint, units) FROM sums WHERE units <> $3::bigint
UNION ALL
SELECT 'S5', order_id, format('the log of the order has %s of the versions from 2 to %s', versions, last) FROM replayed
WHERE first <> 2 OR last <> events + 1 OR versions <> events
UNION ALL
SELECT 'S5', order_id, 'the events of the order are of several users or quantities' FROM replayed WHERE users <> 1 OR quantities <> 1
UNION ALL
SELECT 'S5', order_id, 'an event is of another sale' FROM archived_events WHERE sale_id <> $1::uuid
UNION ALL
SELECT 'S5', order_id, 'the order has no place or no reservation' FROM archived_events WHERE version = 2 AND (reserved_at IS NULL OR NOT data ? 'sequence')
