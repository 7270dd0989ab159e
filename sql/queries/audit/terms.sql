-- S7: sales whose terms in Postgres are outside the bounds of reservation.Terms, so that they cannot be published to
-- Redis, or no order could hold what they allow.
SELECT s.id AS sale_id, NULL::uuid AS order_id, NULL AS user_id, 'the sale has invalid terms: ' || wrong.terms AS what, 'operator' AS remedy
FROM sales AS s JOIN audit_sales AS a ON a.sale_id = s.id
CROSS JOIN LATERAL (SELECT count(*) AS items, sum(stock) AS stock FROM sale_items WHERE sale_id = s.id) AS own
CROSS JOIN LATERAL (
    SELECT string_agg(format('%s is %s', field, is_now), ', ') AS terms
    FROM (VALUES
        ('opens_at', s.opens_at::text, coalesce(s.opens_at >= to_timestamp(0.001) AND s.opens_at < to_timestamp(253402300800), true)),
        ('closes_at', s.closes_at::text, coalesce(s.closes_at >= to_timestamp(0.001) AND s.closes_at < to_timestamp(253402300800), true) AND coalesce(s.closes_at > s.opens_at, true)),
        ('stock', s.stock::text, s.stock BETWEEN 1 AND 100000000),
        ('per_order_limit', s.per_order_limit::text, s.per_order_limit BETWEEN 1 AND 1000000),
        ('payment_window_seconds', s.payment_window_seconds::text, s.payment_window_seconds BETWEEN 0 AND 2592000),
        ('payment_grace_seconds', s.payment_grace_seconds::text, s.payment_grace_seconds BETWEEN 0 AND CASE WHEN s.payment_window_seconds > 0 THEN 3600 ELSE 0 END),
        ('payments_per_second', s.payments_per_second::text, s.payments_per_second BETWEEN 0 AND CASE WHEN s.payment_window_seconds > 0 THEN 10000 ELSE 0 END),
        ('unit_price', s.unit_price::text, coalesce(s.unit_price BETWEEN 1 AND 1000000000, true)),
        ('items', s.items::text, s.items = own.items),
        ('stock of all items', own.stock::text, s.items = 0 OR own.stock = s.stock),
        ('epoch', s.epoch::text, s.epoch BETWEEN 1 AND 999999999)
    ) AS known (field, is_now, possible)
    WHERE NOT possible
) AS wrong
WHERE wrong.terms IS NOT NULL
