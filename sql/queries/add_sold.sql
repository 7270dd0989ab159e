-- Counts units of newly confirmed orders ($2) in their sale ($1). The constraint sales_not_oversold
-- refuses what the stock does not hold. It is the last statement before COMMIT: the row of a hot
-- sale is what all workers wait for.
UPDATE sales SET sold = sold + $2 WHERE id = $1
