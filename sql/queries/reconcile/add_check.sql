-- Adds the findings of a check that have a remedy to the differences of the look $1. The caller puts the check, which is a
-- query without parameters, where the braces are.
INSERT INTO reconcile_looks (look, sale_id, order_id, user_id, what, remedy, same)
SELECT $1::integer, sale_id, order_id, user_id, what, remedy, coalesce(to_jsonb(c) ->> 'same', what) FROM (
{{check}}
) AS c WHERE remedy <> ''
