-- Adds the events $1 of a sale that Postgres lacks. {{values}} as in insert_events.sql.
INSERT INTO sale_events ({{columns}})
SELECT {{values}} FROM (SELECT * FROM jsonb_populate_recordset(NULL::sale_events, $1) ORDER BY position DESC) AS events
ON CONFLICT (sale_id, revision) DO NOTHING
