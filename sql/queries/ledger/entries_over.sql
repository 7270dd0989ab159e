-- Whether the entries $1 of a draw are over by now, and whether the transaction began before their end; no row for others.
SELECT e.closes_at <= clock_timestamp() AS over, now() < e.closes_at AS began_before
FROM draws AS d JOIN sales AS e ON e.id = d.entries_id WHERE d.entries_id = $1 AND d.kind = 'draw'
