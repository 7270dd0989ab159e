-- The epoch of the sale $1.
SELECT epoch FROM sales WHERE id = $1
