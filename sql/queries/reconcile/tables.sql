-- The differences of two successive looks, and those that both found, for the session of one
-- reconcile. Run by the simple protocol. Rows with the same text in the column same are the same
-- difference.
DROP TABLE IF EXISTS reconcile_looks, reconcile_found;
CREATE TEMP TABLE reconcile_looks (look integer NOT NULL, sale_id uuid, order_id uuid, user_id text, what text, remedy text NOT NULL, same text NOT NULL);
CREATE TEMP TABLE reconcile_found (n bigint GENERATED ALWAYS AS IDENTITY, sale_id uuid, order_id uuid, user_id text, what text, remedy text NOT NULL, same text NOT NULL);
