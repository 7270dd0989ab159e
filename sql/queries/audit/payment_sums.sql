-- How many payments have been reported in each currency, and their sums in minor units: reported, and what became of it. What buyers claim is
-- no money; what people have dismissed counts as unclear.
SELECT currency, count(*) AS payments,
       least(coalesce(sum(reported) FILTER (WHERE is_reported), 0), 9e18)::bigint AS reported,
       least(coalesce(sum(amount) FILTER (WHERE state = 'settled'), 0), 9e18)::bigint AS settled, count(*) FILTER (WHERE state = 'settled') AS settled_payments,
       least(coalesce(sum(amount) FILTER (WHERE state = 'refund_due'), 0), 9e18)::bigint AS refund_due, count(*) FILTER (WHERE state = 'refund_due') AS refund_due_payments,
       least(coalesce(sum(amount) FILTER (WHERE state = 'refunded'), 0), 9e18)::bigint AS refunded, count(*) FILTER (WHERE state = 'refunded') AS refunded_payments,
       least(coalesce(sum(amount) FILTER (WHERE state = 'waiting'), 0), 9e18)::bigint AS waiting, count(*) FILTER (WHERE state = 'waiting') AS waiting_payments,
       least(coalesce(sum(amount) FILTER (WHERE state IN ('unclear', 'dismissed')), 0), 9e18)::bigint AS unclear, count(*) FILTER (WHERE state IN ('unclear', 'dismissed')) AS unclear_payments,
       least(coalesce(sum(amount) FILTER (WHERE state = 'disputed'), 0), 9e18)::bigint AS disputed, count(*) FILTER (WHERE state = 'disputed') AS disputed_payments
FROM audit_payments WHERE state <> 'claimed'
GROUP BY currency
ORDER BY currency
