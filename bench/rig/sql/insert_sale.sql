-- Inserts the sale $1 with a stock of $2 units.
INSERT INTO sales (id, name, stock) VALUES ($1, 'bench', $2)
