-- The lasting differences: those of the second look that the first one found too. Data in transit
-- has arrived in between, and the differences of a sale in progress change with each look.
INSERT INTO reconcile_found (sale_id, order_id, user_id, what, remedy, same)
SELECT DISTINCT ON (sale_id, remedy, order_id, user_id, what) sale_id, order_id, user_id, what, remedy, same
FROM reconcile_looks AS n
WHERE n.look = 2 AND EXISTS (
    SELECT FROM reconcile_looks AS s
    WHERE s.look = 1 AND s.remedy = n.remedy AND s.same = n.same AND s.sale_id IS NOT DISTINCT FROM n.sale_id AND s.order_id IS NOT DISTINCT FROM n.order_id AND s.user_id IS NOT DISTINCT FROM n.user_id)
ORDER BY sale_id, remedy, order_id, user_id, what
