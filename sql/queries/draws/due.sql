-- The draws, or by $1 the waiting lists, of which units may have to be offered: first those that have waited longest.
SELECT due.sale_id, due.turn FROM offers_due AS due JOIN draws AS d USING (sale_id) WHERE d.kind = $1 ORDER BY due.turn
