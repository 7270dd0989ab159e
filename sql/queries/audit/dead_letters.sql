-- S3: stream entries that wait for an operator's decision.
SELECT NULL::uuid AS sale_id, NULL::uuid AS order_id, NULL AS user_id,
       format('dead letter %s (entry %s of %s) waits for a decision: %s', id, left(entry_id, 100), left(stream, 100), left(reason, 1000)) AS what, 'dlq' AS remedy
FROM dead_letters
WHERE status = 'parked'
