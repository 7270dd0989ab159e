-- A sale whose orders are archived and to which the order $1 may have belonged: it shares two bytes with the order, and was
-- created before it.
SELECT id FROM sales WHERE right(id::text, 4) = right($1::uuid::text, 4) AND archived_at IS NOT NULL AND id < $1 LIMIT 1
