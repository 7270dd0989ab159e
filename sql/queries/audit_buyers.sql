-- The buyers once each, with an index and the figures that the planner needs.
CREATE TEMP TABLE audit_buyers AS SELECT DISTINCT ON (sale_id, user_id) * FROM audit_scan ORDER BY sale_id, user_id;
CREATE INDEX ON audit_buyers (order_id);
CREATE INDEX ON audit_waiting (order_id);
ANALYZE audit_buyers, audit_sales, audit_waiting;
