-- The differences of two looks, one after the other, and those that were there both times, for the session of
-- one reconcile. Run as it is by the simple protocol. What has the same text in the column same is the same difference.
DROP TABLE IF EXISTS reconcile_looks, reconcile_found;
CREATE TEMP TABLE reconcile_looks (look integer NOT NULL, sale_id uuid, order_id uuid, user_id text, what text, remedy text NOT NULL, same text NOT NULL);
CREATE TEMP TABLE reconcile_found (n bigint GENERATED ALWAYS AS IDENTITY, sale_id uuid, order_id uuid, user_id text, what text, remedy text NOT NULL, same text NOT NULL);
