-- The units of the sale $1 that live orders hold. It runs often during a sale, so it reads one row.
SELECT sold FROM sales WHERE id = $1
