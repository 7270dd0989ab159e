-- Joins a sale to the sale in which people enter its draw, or wait for its units. Nobody buys units of a sale that is
-- drawn, nor places to wait.
-- $1 sale, $2 sale of the entries, $3 kind, $4 freeze_seconds, $5 parties or null, $6 version
WITH offered AS (UPDATE sales SET offers_only = true WHERE id = CASE $3::text WHEN 'draw' THEN $1::uuid ELSE $2 END)
INSERT INTO draws (sale_id, entries_id, kind, freeze_seconds, parties, version) VALUES ($1, $2, $3, $4, $5, $6)
