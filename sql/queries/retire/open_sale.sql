-- What may still change of the sale $1; no row if nothing may.
SELECT reason FROM open_sale($1) LIMIT 1
