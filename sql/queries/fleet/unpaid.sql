-- Of each of the sales $1: how many unpaid orders have a deadline within a minute, and within five, each counted up to $2;
-- the last turn to pay that has not come, or NULL; and how many payments a second were settled and became due for refund
-- in the last minute, or over the time of the newest $3. Times that an outage has moved are those of the deadlines.
SELECT s.id AS sale_id, o.in_minute, o.in_five, CASE WHEN last.turn > now() THEN last.turn END AS last_turn, settled.rate AS settled, due.rate AS due
FROM unnest($1::uuid[]) AS s (id)
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE due <= pay_clock() + interval '1 minute') AS in_minute, count(*) AS in_five
    FROM (SELECT due FROM orders WHERE sale_id = s.id AND status = 'confirmed' AND due <= (SELECT pay_clock() + interval '5 minutes') ORDER BY due LIMIT $2) AS soon
) AS o
CROSS JOIN LATERAL (
    SELECT count(*) / CASE count(*) WHEN $3 THEN greatest(extract(epoch FROM now() - min(occurred_at)), 1) ELSE 60 END::double precision AS rate
    FROM (SELECT occurred_at FROM payment_events WHERE sale_id = s.id AND type = 'PaymentSettled' ORDER BY position DESC LIMIT $3) AS newest
    WHERE occurred_at > now() - interval '1 minute'
) AS settled
CROSS JOIN LATERAL (
    SELECT count(*) / CASE count(*) WHEN $3 THEN greatest(extract(epoch FROM now() - min(occurred_at)), 1) ELSE 60 END::double precision AS rate
    FROM (SELECT occurred_at FROM payment_events WHERE sale_id = s.id AND type = 'PaymentRefundDue' ORDER BY position DESC LIMIT $3) AS newest
    WHERE occurred_at > now() - interval '1 minute'
) AS due
LEFT JOIN LATERAL (SELECT pay_from AS turn FROM orders WHERE sale_id = s.id AND pay_from IS NOT NULL ORDER BY pay_from DESC LIMIT 1) AS last ON true
