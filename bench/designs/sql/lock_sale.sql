-- Takes the row of the sale $1 before a batch is sold from it, so that what the next statement sees of
-- the sale and of its orders stands until the end of the transaction. A sale without stock is left alone:
-- then nothing will be written, and no transaction has to wait for the disk.
SELECT FROM sales WHERE id = $1 AND sold < stock FOR UPDATE
