-- Adds $2 to the units that live orders hold in the sale $1, of which $3 is the highest place in it. The constraint
-- sales_not_oversold refuses what the stock does not hold. It is the last statement before COMMIT: the row of
-- a hot sale is what all workers wait for.
--
-- If the sale has come to a later epoch than $4, that of the orders, since they were decided, they may not be
-- recorded any more. The statement fails then, because COMMIT is sent with it and must not be reached: a
-- sale has an epoch, and here it would have none.
UPDATE sales SET sold = sold + $2, last_sequence = greatest(last_sequence, $3), epoch = CASE WHEN epoch <= $4 THEN epoch END
WHERE id = $1
