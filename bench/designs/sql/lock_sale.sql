-- Locks the row of the sale $1 before a batch is sold from it, so that the sale and its orders do not
-- change between the next statement and the end of the transaction. A sold-out sale is not locked:
-- nothing will be written, and no transaction has to wait for the disk.
SELECT FROM sales WHERE id = $1 AND sold < stock FOR UPDATE
