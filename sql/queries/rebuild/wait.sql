-- For how many seconds a sale is not to be rebuilt again for one of the reasons $2, given how often it was in the last day: at once
-- the first time, a minute after the first one, then after 2, 4, 8 … minutes, and after an hour at most. $1 sale
SELECT coalesce(extract(epoch FROM max(occurred_at) + interval '1 minute' * least(60, power(2, least(count(*), 10) - 1)) - now()), 0)::float8
FROM sale_events
WHERE sale_id = $1 AND type = 'SaleRebuilt' AND data ->> 'reason' = ANY ($2::text[]) AND occurred_at > now() - interval '1 day'
