-- The units of the sale $1 that live orders hold. Asked often while a sale runs, so it reads one row.
SELECT sold FROM sales WHERE id = $1
