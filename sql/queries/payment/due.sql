-- The refunds that are due by currency: how many, counted up to 10000, the sum of these, the oldest, in minor units (at most the largest
-- bigint), and when the oldest one became due.
WITH RECURSIVE currencies AS (
    (SELECT currency FROM open_payments WHERE state = 'refund_due' AND currency IS NOT NULL ORDER BY currency LIMIT 1)
    UNION ALL
    SELECT next.currency FROM currencies AS c CROSS JOIN LATERAL (
        SELECT currency FROM open_payments WHERE state = 'refund_due' AND currency > c.currency ORDER BY currency LIMIT 1
    ) AS next
)
SELECT coalesce(d.currency, '') AS currency, d.payments, d.amount, (SELECT since FROM open_payments WHERE state = 'refund_due' AND position = d.first) AS since
FROM (
    SELECT c.currency, counted.* FROM currencies AS c CROSS JOIN LATERAL (
        SELECT count(*) AS payments, least(coalesce(sum(amount), 0), 9223372036854775807)::bigint AS amount, min(position) AS first
        FROM (SELECT amount, position FROM open_payments WHERE state = 'refund_due' AND currency = c.currency ORDER BY position LIMIT 10000) AS oldest
    ) AS counted
    UNION ALL
    SELECT NULL, count(*), 0, min(position)
    FROM (SELECT position FROM open_payments WHERE state = 'refund_due' AND currency IS NULL ORDER BY position LIMIT 10000) AS oldest
) AS d
WHERE d.payments > 0
ORDER BY 1
