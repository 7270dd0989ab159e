-- Takes at most $2 releases of one sale. What others are taking is passed over, and so are the sales $1.
-- The caller tells Redis and commits; if it dies in between, they are there again.
WITH first AS MATERIALIZED (
    SELECT sale_id FROM releases
    WHERE sale_id <> ALL ($1::uuid[])
    ORDER BY sale_id, created_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED
), taken AS MATERIALIZED (
    SELECT order_id FROM releases
    WHERE sale_id = (SELECT sale_id FROM first)
    ORDER BY created_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
)
DELETE FROM releases USING taken WHERE releases.order_id = taken.order_id
RETURNING releases.sale_id, releases.order_id, releases.user_id
