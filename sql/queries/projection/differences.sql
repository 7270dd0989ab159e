-- The orders whose log is damaged, and those whose row is not what the log says: S5 of the audit, and what a rebuild
-- of the projections mends. It is one statement, so it sees a row and its events as they were written: together. The
-- caller puts replay.sql and a condition of sale_id where the braces are.
--
-- Returns the order, what is wrong, and the remedy: projections, or operator if the log is damaged. A row without a log
-- is in the wrong sale if its id is of another one (its last two bytes are not the sale's); otherwise its events are lost.
SELECT sale_id, id AS order_id, coalesce(r.user_id, o.user_id) AS user_id,
       CASE WHEN r.id IS NULL AND stray THEN 'the order''s row is in the wrong sale'
            WHEN r.id IS NULL THEN format('the order is %s and has no events', o.status)
            WHEN r.damage IS NOT NULL THEN r.damage
            WHEN o.id IS NULL AND stray THEN 'the events of the order are in the wrong sale'
            WHEN o.id IS NULL THEN 'the order has events and no row'
            ELSE 'the order''s row is not what its log says: ' || different.columns
       END AS what,
       CASE WHEN r.id IS NULL AND NOT stray OR r.damage IS NOT NULL OR o.id IS NULL AND stray THEN 'operator' ELSE 'projections' END AS remedy
FROM (
{{replay}}
) AS r FULL JOIN (SELECT * FROM orders WHERE {{sales}}) AS o USING (sale_id, id)
CROSS JOIN LATERAL (
    SELECT right(id::text, 4) <> right(sale_id::text, 4) AS stray, string_agg(format('%s is %s and not %s', name, coalesce(row, 'missing'), coalesce(log, 'missing')), ', ') AS columns
    FROM (VALUES
        ('user_id', o.user_id, r.user_id), ('quantity', o.quantity::text, r.quantity::text), ('status', o.status, r.status),
        ('version', o.version::text, r.version::text), ('sequence', o.sequence::text, r.sequence::text), ('epoch', o.epoch::text, r.epoch::text),
        ('reserved_at', o.reserved_at::text, r.reserved_at::text), ('updated_at', o.updated_at::text, r.updated_at::text),
        ('reason', o.reason, r.reason), ('due', o.due::text, r.due::text), ('pay_from', o.pay_from::text, r.pay_from::text), ('payment_reference', o.payment_reference, r.payment_reference),
        ('key_fingerprint', o.key_fingerprint, r.key_fingerprint), ('lines', o.lines, r.lines)
    ) AS known (name, row, log)
    WHERE row IS DISTINCT FROM log
) AS different
WHERE r.damage IS NOT NULL
   OR (r.user_id, r.quantity, r.status, r.version, r.sequence, r.epoch, r.reserved_at, r.updated_at, r.reason, r.due, r.pay_from, r.payment_reference, r.key_fingerprint, r.lines)
      IS DISTINCT FROM
      (o.user_id, o.quantity, o.status, o.version, o.sequence, o.epoch, o.reserved_at, o.updated_at, o.reason, o.due, o.pay_from, o.payment_reference, o.key_fingerprint, o.lines)
