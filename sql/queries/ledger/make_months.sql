-- Makes sure that the orders of the sales $1 have tables. Every sale has them since its creation, unless they were
-- removed manually; the sale of a refused order may be unknown.
SELECT make_month(sale) FROM (SELECT DISTINCT unnest($1::uuid[])) AS sales (sale)
