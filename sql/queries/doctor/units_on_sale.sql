-- How many units are on sale, or will be, that no live order holds: of the sale $1, or of all if that is null.
-- Answers: how many sales there are, over or not, and the units.
SELECT count(*), coalesce(sum(stock - sold) FILTER (WHERE state <> 'ended' AND (closes_at IS NULL OR closes_at > now())), 0)::bigint
FROM sales WHERE $1::uuid IS NULL OR id = $1
