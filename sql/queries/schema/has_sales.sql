-- Whether there is any sale.
SELECT EXISTS (SELECT FROM sales)
