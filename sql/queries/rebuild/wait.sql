-- The seconds until a sale may be rebuilt again for one of the reasons $2. The pause grows with the rebuilds of the last
-- day: none at first, then 1, 2, 4, 8 … minutes, at most an hour. A later time than now is from before the clock was set
-- back, and does not count. $1 sale
SELECT coalesce(extract(epoch FROM max(occurred_at) + interval '1 minute' * least(60, power(2, least(count(*), 10) - 1)) - now()), 0)::float8
FROM sale_events
WHERE sale_id = $1 AND type = 'SaleRebuilt' AND data ->> 'reason' = ANY ($2::text[]) AND occurred_at BETWEEN now() - interval '1 day' AND now()
