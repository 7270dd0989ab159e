-- Sells unlocked units to one buyer, and writes the rows that the order has in the product's ledger
-- (sql/queries/ledger/record_orders.sql). It is its own transaction.
--
-- $1 order, $2 sale, $3 user, $4 quantity, $5 the lowest unit to look at
--
-- Returns a word: confirmed, already-purchased or sold-out. While units are left, the unique index of
-- live orders refuses a user who has an order: the statement fails, and the units are not taken.
WITH free AS MATERIALIZED (
    SELECT unit FROM bench_units
    WHERE sale_id = $2 AND unit >= $5
    ORDER BY sale_id, unit
    LIMIT $4
    FOR UPDATE SKIP LOCKED
), enough AS MATERIALIZED (
    SELECT unit FROM free WHERE (SELECT count(*) FROM free) = $4
), sold AS (
    DELETE FROM bench_units USING enough WHERE bench_units.sale_id = $2 AND bench_units.unit = enough.unit
), sale AS (
    SELECT min(unit) AS sequence, (SELECT epoch FROM sales WHERE id = $2) AS epoch FROM enough HAVING count(*) > 0
), placed AS (
    INSERT INTO orders (id, sale_id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, key_fingerprint)
    SELECT $1, $2, $3, $4, 'confirmed', 2, sequence, epoch, now(), now(), NULL
    FROM sale
), logged AS (
    INSERT INTO order_events (order_id, version, type, sale_id, user_id, quantity, occurred_at, reserved_at, sequence, epoch)
    SELECT $1, 2, 'OrderConfirmed', $2, $3, $4, now(), now(), sequence, epoch
    FROM sale
)
SELECT coalesce((SELECT sequence FROM sale), 0), CASE
    WHEN EXISTS (SELECT FROM sale) THEN 'confirmed'
    WHEN EXISTS (SELECT FROM orders WHERE sale_id = $2 AND user_id = $3 AND status IN ('confirmed', 'paid')) THEN 'already-purchased'
    ELSE 'sold-out'
END
