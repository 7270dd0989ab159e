-- Locks the sale $1 until the end of the transaction, also against reports of payments (payment/report.sql).
SELECT id FROM sales WHERE id = $1 FOR UPDATE
