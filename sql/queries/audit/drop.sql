-- Drops the tables of tables.sql, buyers.sql and figures.sql.
DROP TABLE IF EXISTS audit_before, audit_sales, audit_scan, audit_ended, audit_waiting, audit_buyers, audit_figures
