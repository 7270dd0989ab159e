-- S8: payments that are not settled, due for refund or refunded, or that do not fit their orders.
--
-- Money waits ten minutes for an order that may still come (ledger.SweepPayments), and longer while a worker cannot know.
SELECT sale_id, order_id, NULL AS user_id, format('the payment %s: %s', left(reference, 100), wrong) AS what,
       CASE WHEN state <> 'waiting' OR sale_id IS NOT NULL THEN 'payment' WHEN EXISTS (SELECT FROM audit_waiting AS w WHERE w.order_id = checked.order_id AND parked) THEN 'dlq' ELSE 'worker' END AS remedy
FROM (
    SELECT *, CASE WHEN first <> 1 OR last <> events THEN format('its log has %s of the versions from 1 to %s', events, last)
                   WHEN NOT is_possible THEN format('its log has an impossible history: %s', history)
                   WHEN contents > 1 THEN 'its events have several orders, amounts or currencies'
                   WHEN sales > 1 OR sales = 1 AND sale_id IS NULL THEN 'its events have several sales'
                   WHEN reason IS NULL AND state IN ('refund_due', 'refunded', 'unclear', 'dismissed') OR reason IS NOT NULL AND state IN ('waiting', 'settled')
                   THEN format('it is %s, and the reason is %s', state, coalesce(reason, 'missing'))
                   WHEN state = 'waiting' AND received_at < now() - interval '15 minutes' THEN format('it waits for its order since %s', to_char(received_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
                   WHEN sale_id IS NULL AND (state = 'settled' OR state = 'refund_due' AND reason NOT IN ('order-not-found', 'order-voided')) THEN format('it is %s, and has no sale', state)
                   WHEN sale_id IS NOT NULL AND NOT EXISTS (SELECT FROM sales WHERE id = sale_id) THEN 'Postgres does not have its sale'
              END AS wrong
    FROM audit_payments
) AS checked
WHERE wrong IS NOT NULL
UNION ALL
-- What a buyer gives as a reference is kept with the order.
SELECT p.sale_id, p.order_id, o.user_id, format('the payment %s settled the order, which is %s', left(p.reference, 100),
           CASE WHEN o.id IS NULL THEN 'missing' WHEN o.status <> 'paid' THEN o.status
                WHEN p.amount IS DISTINCT FROM price.amount OR p.currency <> s.currency THEN format('one of %s %s and not of %s %s', price.amount, s.currency, p.amount, p.currency)
                ELSE 'paid with ' || coalesce(left(o.payment_reference, 100), 'nothing') END), 'payment'
FROM audit_payments AS p LEFT JOIN orders AS o ON o.sale_id = p.sale_id AND o.id = p.order_id LEFT JOIN sales AS s ON s.id = p.sale_id
CROSS JOIN LATERAL (SELECT CASE WHEN o.lines IS NULL THEN s.unit_price::numeric * o.quantity ELSE (
    SELECT sum(i.unit_price::numeric * l.units) FROM order_lines(o.lines) AS l JOIN sale_items AS i ON i.sale_id = s.id AND i.item = l.item) END AS amount) AS price
WHERE p.state = 'settled' AND ((o.status = 'paid' AND p.reference IN (o.payment_reference, concat(o.id, ':', o.payment_reference))) IS NOT TRUE
   OR s.currency IS NOT NULL AND (p.amount, p.currency) IS DISTINCT FROM (price.amount, s.currency::text))
UNION ALL
SELECT o.sale_id, o.id, o.user_id, format('the order is %s, and %s with the reference %s', o.status,
           CASE o.status WHEN 'paid' THEN 'no payment settled it' ELSE 'no refund is due' END, coalesce(left(o.payment_reference, 100), 'missing')),
       CASE WHEN EXISTS (SELECT FROM order_events AS e WHERE e.sale_id = o.sale_id AND e.order_id = o.id AND e.type = 'OrderPaid') THEN 'payment' ELSE 'projections' END
FROM orders AS o JOIN audit_sales USING (sale_id)
WHERE (o.status = 'paid' OR o.status = 'cancelled' AND o.payment_reference IS NOT NULL)
  AND NOT EXISTS (
      SELECT FROM audit_payments AS p
      WHERE p.order_id = o.id AND p.reference IN (o.payment_reference, concat(o.id, ':', o.payment_reference))
        -- Money may be back, or be asked back, without a change of the order.
        AND CASE WHEN p.state = 'disputed' OR p.state = 'refunded' AND p.reason = 'refunded-outside' THEN true
                 WHEN o.status = 'paid' THEN p.state = 'settled' ELSE p.state IN ('refund_due', 'refunded') END)
UNION ALL
-- The buyer's word and the shop's report of one payment.
SELECT p.sale_id, p.order_id, NULL, format('the payment %s counts twice: as the buyer has claimed it, too', left(p.reference, 100)), 'payment'
FROM audit_payments AS p JOIN audit_payments AS claim ON claim.reference = concat(p.order_id, ':', p.reference)
WHERE p.state NOT IN ('unclear', 'dismissed', 'claimed') AND claim.state <> 'claimed'
UNION ALL
SELECT p.sale_id, p.order_id, NULL, format('the payment %s is %s, and among the open payments it is %s', left(p.reference, 100), p.state, coalesce(open.state, 'missing')), 'payment'
FROM audit_payments AS p LEFT JOIN open_payments AS open USING (reference)
WHERE (open.state, open.version) IS DISTINCT FROM (
    CASE WHEN p.state IN ('waiting', 'refund_due', 'unclear', 'disputed') THEN p.state END,
    CASE WHEN p.state IN ('waiting', 'refund_due', 'unclear', 'disputed') THEN p.last END)
UNION ALL
SELECT NULL, NULL, NULL, format('%s %s were reported, and %s are settled, due for refund, refunded, waiting, unclear or disputed', coalesce(sum(reported), 0), coalesce(nullif(currency, ''), 'of no currency'), coalesce(sum(amount), 0)), 'payment'
FROM (
    SELECT currency, 0 AS reported, amount FROM audit_payments WHERE state <> 'claimed'
    UNION ALL
    SELECT reported_currency, reported, 0 FROM audit_payments WHERE is_reported AND state <> 'claimed'
) AS both_sides
GROUP BY currency HAVING coalesce(sum(reported), 0) <> coalesce(sum(amount), 0)
