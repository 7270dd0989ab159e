-- The units of sales that have not ended, without those of live orders: of the sale $1, or of all if it is null.
-- Returns: the number of sales, ended or not, and the units.
SELECT count(*), coalesce(sum(stock - sold) FILTER (WHERE state <> 'ended' AND (closes_at IS NULL OR closes_at > now())), 0)::bigint
FROM sales WHERE $1::uuid IS NULL OR id = $1
