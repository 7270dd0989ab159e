-- Adds a difference to those of the look $1, as Redis alone showed it.
INSERT INTO reconcile_looks (look, sale_id, order_id, user_id, what, remedy, same) VALUES ($1, $2, $3, $4, $5, $6, $7)
