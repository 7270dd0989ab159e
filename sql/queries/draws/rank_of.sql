-- The rank of the nth entry ($3, from 0) of the chunk $2 of the draw of the sale $1.
SELECT ('x' || encode(substring(ranks FROM 4 * $3::int + 1 FOR 4), 'hex'))::bit(32)::int FROM draw_ranks WHERE sale_id = $1 AND chunk = $2
