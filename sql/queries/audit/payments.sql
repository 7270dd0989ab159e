-- The payments of the audited sales, one row each, and those without a sale: the latest row of each says what became of it.
CREATE TEMP TABLE audit_payments AS
SELECT * FROM (
    SELECT reference, count(*) AS events, min(version) AS first, max(version) AS last, string_agg(type, ' ' ORDER BY version) AS history,
           count(DISTINCT (order_id, amount, currency)) AS reports, count(DISTINCT sale_id) AS sales, min(occurred_at) AS received_at,
           (array_agg(order_id ORDER BY version DESC))[1] AS order_id, (array_agg(sale_id ORDER BY version DESC))[1] AS sale_id,
           (array_agg(amount ORDER BY version DESC))[1] AS amount, coalesce((array_agg(currency ORDER BY version DESC))[1]::text, '') AS currency,
           (array_agg(amount ORDER BY version))[1] AS reported, coalesce((array_agg(currency ORDER BY version))[1]::text, '') AS reported_currency,
           (array_agg(reason ORDER BY version DESC))[1] AS reason, min(version) = 1 AS is_reported,
           CASE (array_agg(type ORDER BY version DESC))[1] WHEN 'PaymentReceived' THEN 'waiting' WHEN 'PaymentSettled' THEN 'settled'
                WHEN 'PaymentRefundDue' THEN 'refund_due' ELSE 'refunded' END AS state
    FROM payment_events GROUP BY reference
) AS payment
WHERE sale_id IS NULL OR sale_id IN (SELECT sale_id FROM audit_sales) OR NOT EXISTS (SELECT FROM sales WHERE id = sale_id);
CREATE INDEX ON audit_payments (order_id);
ANALYZE audit_payments;
