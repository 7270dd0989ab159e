-- The payments of the audited sales, one row each, and those without a sale: the latest row of each says what became of it. What was
-- reported is what the latest report says: one that can be read takes the place of one that could not be.
--
-- {{steps}} are the pairs of types of which the second one may follow the first (order.PaymentSteps).
CREATE TEMP TABLE audit_payments AS
SELECT * FROM (
    SELECT reference, count(*) AS events, min(version) AS first, max(version) AS last, string_agg(type, ' ' ORDER BY version) AS history,
           coalesce(bool_and(CASE WHEN before = type THEN data ? 'note' WHEN before IS NULL THEN type = 'PaymentReceived' ELSE concat(before, ' ', type) IN ({{steps}}) END), true) AS is_possible,
           count(DISTINCT (order_id, amount, currency)) FILTER (WHERE report = reports) AS contents,
           count(DISTINCT sale_id) FILTER (WHERE report = reports) AS sales, max(occurred_at) FILTER (WHERE type = 'PaymentReceived') AS received_at,
           (array_agg(order_id ORDER BY version DESC))[1] AS order_id, (array_agg(sale_id ORDER BY version DESC))[1] AS sale_id,
           (array_agg(amount ORDER BY version DESC))[1] AS amount, coalesce((array_agg(currency ORDER BY version DESC))[1]::text, '') AS currency,
           (array_agg(amount ORDER BY version DESC) FILTER (WHERE type = 'PaymentReceived'))[1] AS reported,
           coalesce((array_agg(currency ORDER BY version DESC) FILTER (WHERE type = 'PaymentReceived'))[1]::text, '') AS reported_currency,
           (array_agg(reason ORDER BY version DESC))[1] AS reason, min(version) = 1 AS is_reported, (array_agg(state ORDER BY version DESC))[1] AS state
    FROM (
        SELECT *, max(report) OVER (PARTITION BY reference) AS reports,
               CASE type WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentSettled' THEN 'settled' WHEN 'PaymentRefundDue' THEN 'refund_due'
                         WHEN 'PaymentRefunded' THEN 'refunded' WHEN 'PaymentUnclear' THEN 'unclear' WHEN 'PaymentDismissed' THEN 'dismissed'
                         WHEN 'PaymentDisputed' THEN 'disputed' ELSE 'claimed' END AS state
        FROM (
            SELECT *, lag(type) OVER versions AS before, count(*) FILTER (WHERE type = 'PaymentReceived') OVER versions AS report
            FROM payment_events WINDOW versions AS (PARTITION BY reference ORDER BY version)
        ) AS events
    ) AS events GROUP BY reference
) AS payment
WHERE sale_id IS NULL OR sale_id IN (SELECT sale_id FROM audit_sales) OR NOT EXISTS (SELECT FROM sales WHERE id = sale_id);
CREATE INDEX ON audit_payments (order_id);
CREATE INDEX ON audit_payments (reference);
ANALYZE audit_payments;
