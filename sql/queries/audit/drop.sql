-- The tables of tables.sql, buyers.sql and figures.sql, as far as they are there.
DROP TABLE IF EXISTS audit_before, audit_sales, audit_scan, audit_ended, audit_waiting, audit_buyers, audit_figures
