-- Checks the promises for the sale of a file, whose events are in archived_events. The caller puts projection/replay.sql
-- where the braces are.
-- $1 sale, $2 its stock, $3 its units sold
--
-- Returns: the promise, an order or NULL, and what is wrong.
WITH replayed AS (
{{replay}}
), live AS (
    SELECT * FROM replayed WHERE status IN ('confirmed', 'paid')
), sums AS (
    SELECT coalesce(sum(quantity), 0) AS units FROM live
)
SELECT 'S1' AS promise, NULL::uuid AS order_id, format('%s units are sold of a stock of %s', greatest(units, $3::bigint), $2::bigint) AS what
FROM sums WHERE greatest(units, $3::bigint) > $2::bigint
UNION ALL
SELECT 'S2', min(id::text)::uuid, format('the user %s has %s live orders', user_id, count(*)) FROM live GROUP BY user_id HAVING count(*) > 1
UNION ALL
SELECT 'S3', id, 'the order awaits payment' FROM live WHERE status = 'confirmed' AND due IS NOT NULL
UNION ALL
SELECT 'S4', NULL, format('sold is %s, and the live orders hold %s units', $3::bigint, units) FROM sums WHERE units <> $3::bigint
UNION ALL
SELECT 'S5', id, damage FROM replayed WHERE damage IS NOT NULL
UNION ALL
SELECT 'S5', order_id, format('the log of the order has version %s %s times', version, count(*)) FROM archived_events GROUP BY order_id, version HAVING count(*) > 1
UNION ALL
SELECT 'S5', order_id, 'an event is of another sale' FROM archived_events WHERE sale_id <> $1::uuid
