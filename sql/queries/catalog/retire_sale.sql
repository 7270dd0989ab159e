-- Retires the sale $1, if it is still in the epoch $2 and at the revision $3: makes its next revision, which deletes
-- its buyers in Redis (lua/retire.lua), and its event. It is ended from then on, also if it was over by its closing
-- time. No order of it may await payment or its release.
--
-- The caller has locked the sale (catalog/lock_sale.sql) in a statement of its own: this one must see what the
-- previous holder of the lock has committed.
--
-- Returns: the revision; no row if the sale has changed, is not over, or has an order that is not final.
WITH sale AS (
    UPDATE sales SET state = 'ended', retired_at = now(), revision = revision + 1
    WHERE id = $1 AND epoch = $2 AND revision = $3 AND published_revision = revision AND retired_at IS NULL AND archived_at IS NULL
      AND (state = 'ended' OR closes_at <= now())
      AND NOT EXISTS (SELECT FROM orders WHERE sale_id = $1 AND status = 'confirmed' AND due IS NOT NULL)
      AND NOT EXISTS (SELECT FROM releases WHERE sale_id = $1)
    RETURNING id, revision, stock, sold
)
INSERT INTO sale_events (sale_id, revision, type, data)
SELECT id, revision, 'SaleRetired', jsonb_build_object('stock', stock, 'sold', sold) FROM sale
RETURNING revision
