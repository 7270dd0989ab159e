-- S5: the log of an order has a gap, or its row differs from the log.
WITH logged AS (
    SELECT sale_id, order_id, max(user_id) AS user_id, max(quantity) AS quantity, count(*) AS events, min(version) AS first, max(version) AS last,
           (array_agg(type ORDER BY version))[1] AS first_type,
           (array_agg(type ORDER BY version DESC))[1] AS last_type,
           max(reserved_at) AS reserved_at, max(data ->> 'sequence') AS sequence, max(data ->> 'reason') FILTER (WHERE version = 2) AS reason, max(data ->> 'reference') AS reference
    FROM order_events JOIN audit_sales USING (sale_id) GROUP BY sale_id, order_id
), judged AS (
    -- The log can replace any row, unless it is damaged itself.
    SELECT *, CASE WHEN first <> 2 OR last <> events + 1 THEN format('the log of the order has %s of the versions from 2 to %s', events, last)
                   WHEN first_type NOT IN ('OrderConfirmed', 'OrderRejected', 'OrderVoided') THEN format('the log of the order begins with %s', first_type)
                   WHEN reserved_at IS NULL THEN 'the log of the order has no reservation'
              END AS damage
    FROM logged
), projected AS (
    SELECT o.* FROM orders AS o JOIN audit_sales USING (sale_id)
)
SELECT coalesce(e.sale_id, o.sale_id) AS sale_id, coalesce(e.order_id, o.id) AS order_id, coalesce(e.user_id, o.user_id) AS user_id,
       CASE WHEN e.order_id IS NULL THEN format('the order is %s and has no events', o.status)
            WHEN e.damage IS NOT NULL THEN e.damage
            WHEN o.id IS NULL THEN 'the order has events and no row'
            WHEN o.version <> e.last OR 'Order' || initcap(o.status) <> e.last_type THEN
                format('the order is %s at version %s, and its log ends with %s at version %s', o.status, o.version, e.last_type, e.last)
            ELSE format('the order''s row and its log differ in sale, place, user, quantity, payment or reason: %s and %s',
                        concat_ws(' ', o.sale_id, o.sequence, o.user_id, o.quantity, o.payment_reference, o.reason), concat_ws(' ', e.sale_id, e.sequence, e.user_id, e.quantity, e.reference, e.reason))
       END AS what,
       CASE WHEN e.order_id IS NULL OR e.damage IS NOT NULL THEN 'operator' ELSE 'projections' END AS remedy
FROM judged AS e FULL JOIN projected AS o ON o.id = e.order_id
WHERE e.order_id IS NULL OR e.damage IS NOT NULL OR o.id IS NULL OR o.version <> e.last OR 'Order' || initcap(o.status) <> e.last_type
   OR (o.sale_id, o.user_id, o.quantity, o.sequence::text, o.payment_reference, o.reason) IS DISTINCT FROM (e.sale_id, e.user_id, e.quantity, e.sequence, e.reference, e.reason)
