-- Takes at most $2 releases of one sale, until the end of the transaction. What others are taking is passed
-- over, and so are the sales $1. If the caller dies before he has noted what came of them, they are there again.
WITH first AS MATERIALIZED (
    SELECT sale_id FROM releases
    WHERE again_at <= now() AND sale_id <> ALL ($1::uuid[])
    ORDER BY again_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
SELECT sale_id, order_id, user_id FROM releases
WHERE again_at <= now() AND sale_id = (SELECT sale_id FROM first)
ORDER BY again_at
LIMIT $2
FOR UPDATE SKIP LOCKED
