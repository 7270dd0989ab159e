-- The orders that differ from their log, for the session of one rebuild. Run unchanged by the simple protocol.
CREATE TEMP TABLE wrong_orders (sale_id uuid NOT NULL, id uuid NOT NULL, what text NOT NULL, damaged boolean NOT NULL);
