-- The refunds that are due by currency: how many, their sum in minor units (at most the largest bigint), and when the oldest one became due.
SELECT coalesce(e.currency, '') AS currency, count(*) AS payments, least(coalesce(sum(e.amount), 0), 9223372036854775807)::bigint AS amount, min(e.occurred_at) AS since
FROM payment_events AS e
WHERE e.type = 'PaymentRefundDue' AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1 OFFSET 0)
GROUP BY 1
ORDER BY 1
