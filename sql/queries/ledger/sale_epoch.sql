-- The epoch of the sale $1, and whether its orders are archived.
SELECT epoch, archived_at IS NOT NULL FROM sales WHERE id = $1
