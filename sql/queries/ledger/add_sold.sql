-- Adds $2 to the units that live orders hold in the sale $1; $3 is the highest place of the orders. The constraint
-- sales_not_oversold refuses what the stock does not hold. It is the last statement before COMMIT, because all
-- workers wait for the row of a hot sale.
--
-- If the sale has left the epoch $4 of the orders since they were decided, they must not be recorded. The statement
-- fails then by setting the epoch to NULL, because COMMIT is sent with it and must not be reached. So it does for a sale
-- that was archived meanwhile.
UPDATE sales SET sold = sold + $2, last_sequence = greatest(last_sequence, $3), epoch = CASE WHEN epoch <= $4 AND archived_at IS NULL THEN epoch END
WHERE id = $1
