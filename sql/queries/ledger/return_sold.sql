-- Takes $2 from the units that live orders hold in the sale $1. It is the last statement before COMMIT, as add_sold.sql.
UPDATE sales SET sold = sold - $2 WHERE id = $1
