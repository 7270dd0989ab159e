-- Sales whose names contain $1 in any case, in the state $2 unless that is NULL, newest first, older than $3 unless that is NULL. It looks
-- at $4 sales, and returns at most $5 that match. The last one that it looked at is returned too, whether it matches or not: the next page
-- begins after it. The sales that are the places of a waiting list are left out, as in find_sales.sql.
--
-- Returns: the id and the name; the state for a buyer; whether it matches; and the number among those that were looked at, from 1.
SELECT id, name, state, matches, n
FROM (
    SELECT id, name, state, n, strpos(lower(name), lower($1)) > 0 AND state = coalesce($2, state) AS matches
    FROM (
        SELECT id, name, row_number() OVER (ORDER BY id DESC) AS n,
               CASE WHEN state = 'ended' OR closes_at <= now() THEN 'ended' WHEN state = 'open' AND opens_at > now() THEN 'scheduled' ELSE state END AS state
        FROM (
            SELECT id, name, state, opens_at, closes_at FROM sales
            WHERE id < coalesce($3, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
              AND (NOT offers_only OR EXISTS (SELECT FROM draws AS d WHERE d.sale_id = sales.id))
            ORDER BY id DESC
            LIMIT $4
        ) AS newest
    ) AS looked
) AS found
WHERE matches OR n = $4
ORDER BY id DESC
LIMIT $5
