-- lock.sql, unless another transaction has the draw: then there is no row.
SELECT sale_id FROM draws WHERE sale_id = $1 FOR NO KEY UPDATE SKIP LOCKED
