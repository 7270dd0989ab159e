-- The orders $2 of the sale $1 and the user $3, or of any user if that is NULL, locked until the end of the transaction in the order of
-- $2. {{locked}} is SKIP LOCKED to leave out those that others have locked, and empty to wait for them.
--
-- late is since how many seconds its time to pay is over, by now, and NULL if it is not (last_overdue); money_waits whether money
-- for it waits for a decision.
SELECT {{columns/order}},
       o.sequence, o.epoch,
       CASE WHEN o.due <= last_overdue(p.seen_at, p.lost, sale.payment_grace_seconds)
            THEN extract(epoch FROM last_overdue(now(), p.lost, sale.payment_grace_seconds) - o.due)::float8 END AS late,
       (SELECT true FROM open_payments WHERE order_id = o.id AND state = 'waiting' LIMIT 1) IS TRUE AS money_waits
FROM unnest($2::uuid[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM orders WHERE sale_id = $1 AND id = wanted.id AND user_id = coalesce($3, user_id) LIMIT 1 FOR UPDATE {{locked}}) AS o
LEFT JOIN pulse AS p ON true LEFT JOIN sales AS sale ON sale.id = $1
WHERE sale.archived_at IS NULL -- else it is about to be deleted
