-- Drops the tables of tables.sql, buyers.sql, payments.sql, rebuilds.sql, shard_figures.sql, item_figures.sql and figures.sql.
DROP TABLE IF EXISTS audit_before, audit_sales, audit_shards, audit_items, audit_scan, audit_ended, audit_waiting, audit_buyers, audit_rebuilds, audit_shard_figures, audit_figures, audit_item_figures, audit_payments
