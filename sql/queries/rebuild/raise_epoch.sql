-- Begins the next epoch of a sale. From now on no order of an earlier epoch is confirmed (ledger/record_orders.sql,
-- ledger/add_sold.sql), so the stock in Redis is rebuilt from the orders that are live now, except those that end
-- before they are read.
-- $1 sale, $2 the highest place that Redis is known to have given out in it, $3 the epoch in which Redis had it, $4 why
-- $5 the epoch in which the caller found it before closing it in Redis, $6 its number of shards from now on, 0 for as
-- many as before
--
-- If the sale has left the epoch $5, another rebuild has raised it: nothing is changed and no row is returned. The other
-- rebuild could have opened the sale meanwhile, and what was accepted since would be void.
--
-- Redis may be ahead if Postgres was restored: an ingress never goes back to an earlier epoch. If Redis is lost as well,
-- nothing shows which epochs there were after the point of the restore. So the first epoch of another timeline is far
-- above those of the one before: otherwise orders of an epoch that was forgotten would count as orders of this one.
--
-- The caller has locked the sale (catalog/lock_sale.sql) in a statement of its own: this one must see what the
-- previous holder of the lock has committed.
--
-- Pending releases are deleted, because the new stock is built without their orders. Releases that another session has
-- locked stay: Redis will not know their orders.
--
-- Returns the definition of the sale in this revision, and the highest place given out.
WITH live AS MATERIALIZED (
    SELECT count(*) AS orders, coalesce(sum(quantity), 0)::bigint AS units, coalesce(max(sequence), 0) AS last_place
    FROM orders WHERE sale_id = $1 AND is_live(status)
), raised AS (
    -- The log has the latest revision, even if the counters of the sale were changed manually.
    UPDATE sales SET epoch = greatest(epoch, $3::bigint) + CASE WHEN $7::bigint IN (0, log.timeline) THEN 1 ELSE 100000 END, shards = greatest(shards, $6::int), revision = log.last + 1, published_revision = least(published_revision, log.last)
    FROM live, (
        SELECT coalesce(max(revision), 0) AS last,
               coalesce((array_agg((data ->> 'timeline')::bigint ORDER BY revision DESC) FILTER (WHERE type = 'SaleRebuilt'))[1], 1) AS timeline
        FROM sale_events WHERE sale_id = $1
    ) AS log WHERE id = $1 AND epoch = $5
    RETURNING sales.*, greatest(last_sequence, last_place, $2::bigint) AS last_given, units, orders
), event AS (
    INSERT INTO sale_events (sale_id, revision, type, data)
    SELECT id, revision, 'SaleRebuilt', jsonb_build_object(
        'epoch', epoch, 'sequence', last_given, 'reason', $4::text, 'stock', stock, 'held', units, 'orders', orders,
        'shards', shards, 'timeline', nullif($7::bigint, 0))
    FROM raised
), due AS (
    -- Offers may be lost (draws/note_due.sql).
    INSERT INTO offers_due (sale_id) SELECT d.sale_id FROM raised JOIN draws AS d ON d.sale_id = raised.id
    ON CONFLICT (sale_id) DO UPDATE SET turn = DEFAULT
), dropped AS (
    DELETE FROM releases WHERE order_id IN (
        SELECT order_id FROM releases WHERE sale_id = (SELECT id FROM raised) FOR UPDATE SKIP LOCKED)
)
SELECT {{columns/sale}}, s.last_given, s.retired_at IS NOT NULL AS retired
FROM raised AS s
