-- Removes the idempotency key from a withdrawn change of a sale, so that the next one can use it.
-- $1 sale, $2 revision of the change
UPDATE sale_events SET idempotency_key = NULL WHERE sale_id = $1 AND revision = $2
