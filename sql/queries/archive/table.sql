-- The events of one file, for the session that reads it, until the end of its transaction.
CREATE TEMP TABLE file_events (LIKE order_events INCLUDING DEFAULTS) ON COMMIT DROP;
CREATE TEMP TABLE file_payments (LIKE payment_events) ON COMMIT DROP;
CREATE TEMP TABLE file_draw (name text, row jsonb) ON COMMIT DROP;
