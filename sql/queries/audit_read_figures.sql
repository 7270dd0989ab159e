-- The figures of audit_figures.sql, as far as a report shows them.
SELECT sale_id, name, stock, sold, orders, live_orders, live_units, unpaid, rejected, voided, lost, events, replayed_units, buyers, present, available, held, places
FROM audit_figures
ORDER BY sale_id
