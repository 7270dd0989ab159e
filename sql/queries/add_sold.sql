-- Adds $2 to the units that live orders hold in the sale $1: what was confirmed, or below zero what comes
-- back. The constraint sales_not_oversold refuses what the stock does not hold. It is the last statement
-- before COMMIT: the row of a hot sale is what all workers wait for.
UPDATE sales SET sold = sold + $2 WHERE id = $1
