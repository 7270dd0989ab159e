-- Takes $2 from the units that live orders hold in the sale $1. Like add_sold.sql, it is the last statement.
-- Returns whether the orders of the sale are archived: they must not change any more.
UPDATE sales SET sold = sold - $2 WHERE id = $1
RETURNING archived_at IS NOT NULL
