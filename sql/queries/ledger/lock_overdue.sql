-- At most $2 orders of the sale $1 whose time to pay is over (last_overdue), locked until the end of the
-- transaction. Orders locked by others and the orders $3 are skipped. A time that is infinite, which no order should have,
-- is returned as the epoch, so that it does not stop the others.
SELECT id, sale_id, user_id, quantity, lines, status, version, CASE WHEN isfinite(reserved_at) THEN reserved_at ELSE 'epoch' END AS reserved_at,
       CASE WHEN isfinite(updated_at) THEN updated_at ELSE 'epoch' END AS updated_at,
       CASE WHEN isfinite(due) THEN due ELSE 'epoch' END AS expires_at,
       coalesce(payment_reference, '') AS payment_reference, coalesce(reason, '') AS reason
FROM orders
WHERE sale_id = $1 AND status = 'confirmed' AND id <> ALL ($3::uuid[])
  AND due <= (SELECT last_overdue(p.seen_at, p.lost, s.payment_grace_seconds) FROM pulse AS p LEFT JOIN sales AS s ON s.id = $1)
  AND NOT EXISTS (SELECT FROM open_payments AS w WHERE w.order_id = orders.id AND w.state = 'waiting')
ORDER BY due
LIMIT $2
FOR UPDATE SKIP LOCKED
