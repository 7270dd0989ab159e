-- The orders of a month whose rows differ from the log, for the session of one rebuild. Run unchanged by the simple
-- protocol.
SET statement_timeout = 0;
CREATE TEMP TABLE wrong_orders (sale_id uuid NOT NULL, id uuid NOT NULL);
