-- Takes the idempotency key from a change of a sale that was withdrawn, so that the next one can have it.
-- $1 sale, $2 revision of the change
UPDATE sale_events SET idempotency_key = NULL WHERE sale_id = $1 AND revision = $2
