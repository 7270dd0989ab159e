-- Takes $2 from the units that live orders hold in the sale $1. Like add_sold.sql, it is the last statement.
UPDATE sales SET sold = sold - $2 WHERE id = $1
