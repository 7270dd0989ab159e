-- Takes $2 from the units that live orders hold in the sale $1. Like add_sold.sql, it is the last statement.
-- It fails for a sale that was archived meanwhile, whose file has the order as it was before.
UPDATE sales SET sold = CASE WHEN archive IS NULL THEN sold - $2 END WHERE id = $1
