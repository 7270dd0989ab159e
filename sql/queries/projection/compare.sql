-- Notes the orders that differ from their log. The caller puts differences.sql where the braces are.
-- $1, $2 the sales from $1 to before $2
INSERT INTO wrong_orders (sale_id, id, what, damaged)
SELECT sale_id, order_id, what, remedy = 'operator' FROM (
{{differences}}
) AS d
