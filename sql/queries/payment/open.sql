-- Payments in the open state $1 in the order of their latest events, after the position $2. It looks at $3 of them, and returns at most
-- $4 that match: of the sale $5, in the currency $6, with the reason $7, in their state since $8 or longer; each of these may be NULL. The
-- last one that it looked at is returned too, whether it matches or not: the next page begins after it.
--
-- Returns the payments, the names of their sales, how many seconds after the deadline of its order money was reported that came too late,
-- whether it matches, and the number of each among those that were looked at, from 1.
WITH looked AS MATERIALIZED (
    SELECT *, row_number() OVER (ORDER BY position) AS n
    FROM (
        (SELECT reference, version, position, currency, since FROM open_payments
         WHERE $5::uuid IS NULL AND ($6::text IS NULL OR $1 <> 'refund_due') AND state = $1 AND position > $2 ORDER BY position LIMIT $3)
        UNION ALL
        (SELECT reference, version, position, currency, since FROM open_payments
         WHERE $5::uuid IS NULL AND $1 = 'refund_due' AND state = 'refund_due' AND currency = $6 AND position > $2 ORDER BY position LIMIT $3)
        UNION ALL
        (SELECT reference, version, position, currency, since FROM open_payments
         WHERE sale_id = $5 AND state = $1 AND position > $2 ORDER BY position LIMIT $3)
    ) AS one_of_three
)
SELECT found.*, coalesce(s.name, '') AS sale_name, coalesce(o.late, 0) AS late_seconds
FROM (
    SELECT e.reference, e.version, e.position, e.order_id, e.sale_id, e.amount, e.currency, $1::text AS state, coalesce(e.reason, '') AS reason,
           first.occurred_at AS received_at, e.occurred_at AS updated_at, e.data, looked.n,
           looked.currency IS NOT DISTINCT FROM coalesce($6, looked.currency) AND e.reason IS NOT DISTINCT FROM coalesce($7::text, e.reason)
               AND looked.since <= coalesce($8::timestamptz, looked.since) AS matches
    FROM looked
    -- One by one, by the index: as in ledger/find_orders.sql.
    CROSS JOIN LATERAL (SELECT * FROM payment_events WHERE reference = looked.reference AND version = looked.version LIMIT 1) AS e
    CROSS JOIN LATERAL (SELECT occurred_at FROM payment_events WHERE reference = looked.reference AND version = 1 LIMIT 1) AS first
) AS found
LEFT JOIN LATERAL (SELECT name FROM sales WHERE id = found.sale_id LIMIT 1) AS s ON true
LEFT JOIN LATERAL (
    -- Outages until the report have postponed the deadline.
    SELECT greatest(extract(epoch FROM found.received_at - due - coalesce((SELECT sum(CASE WHEN back THEN began_at - ended_at ELSE ended_at - began_at END) FROM outages WHERE began_at < found.received_at), '0')), 0)::bigint AS late
    FROM orders WHERE sale_id = found.sale_id AND id = found.order_id AND found.reason = 'order-expired' LIMIT 1
) AS o ON true
WHERE found.matches OR found.n = $3
ORDER BY found.position
LIMIT $4
