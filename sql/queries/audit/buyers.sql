-- The buyers once each, with an index and the figures that the planner needs. Who came after the sale was looked at is left
-- out; but a place that was not even given out a while after the buyers were read was given to nobody.
CREATE TEMP TABLE audit_buyers AS
SELECT DISTINCT ON (b.sale_id, b.user_id) b.*, b.sequence > coalesce(a.latest, a.places) AS beyond
FROM audit_scan AS b JOIN audit_sales AS a USING (sale_id)
WHERE NOT b.late OR b.sequence > coalesce(a.latest, a.places)
ORDER BY b.sale_id, b.user_id;
CREATE INDEX ON audit_buyers (order_id);
CREATE INDEX ON audit_waiting (order_id);
ANALYZE audit_buyers, audit_sales, audit_waiting, audit_ended;
