-- Adds the events $1 of a sale that Postgres lacks.
INSERT INTO sale_events SELECT * FROM jsonb_populate_recordset(NULL::sale_events, $1) ON CONFLICT DO NOTHING
