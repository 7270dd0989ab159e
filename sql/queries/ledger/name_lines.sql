-- The items of an order of the sale $1 with the lines $2, which Postgres does not have.
SELECT order_items($1, $2)
