-- Joins a sale to the sale in which people enter its draw, or wait for its units.
-- $1 sale, $2 sale of the entries, $3 kind, $4 freeze_seconds, $5 parties or null
WITH goods AS (UPDATE sales SET offers_only = true WHERE id = $1 AND $3 = 'draw')
INSERT INTO draws (sale_id, entries_id, kind, freeze_seconds, parties) VALUES ($1, $2, $3, $4, $5)
