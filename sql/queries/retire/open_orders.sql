-- Whether an order of the sale $1 awaits payment, and whether the units of one are not released yet.
SELECT EXISTS (SELECT FROM orders WHERE sale_id = $1 AND status = 'confirmed' AND due IS NOT NULL) AS unpaid,
       EXISTS (SELECT FROM releases WHERE sale_id = $1) AS releasing
