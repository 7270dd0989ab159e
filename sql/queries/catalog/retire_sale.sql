-- Retires the sale $1, if it is still in the epoch $2 and at the revision $3: makes its next revision, which deletes
-- its buyers in Redis (lua/retire.lua), and its event. It is ended from then on, also if it was over by its closing
-- time. Nothing of it may change any more.
--
-- The caller has locked the sale (catalog/lock_sale.sql) in a statement of its own: this one must see what the
-- previous holder of the lock has committed.
--
-- Returns: the revision; no row if the sale has changed, or something of it may still change.
WITH sale AS (
    UPDATE sales SET state = 'ended', retired_at = now(), revision = revision + 1
    WHERE id = $1 AND epoch = $2 AND revision = $3 AND retired_at IS NULL
      AND NOT EXISTS (SELECT FROM open_sale($1))
    RETURNING id, revision, stock, sold
), turns AS (
    DELETE FROM pay_turns WHERE sale_id IN (SELECT id FROM sale)
)
INSERT INTO sale_events (sale_id, revision, type, data)
SELECT id, revision, 'SaleRetired', jsonb_build_object('stock', stock, 'sold', sold) FROM sale
RETURNING revision
