-- S3: entries of the streams $1 that wait for an operator's decision.
SELECT NULL::uuid AS sale_id, NULL::uuid AS order_id, NULL AS user_id,
       format('dead letter %s (entry %s of %s) waits for a decision: %s', id, entry_id, stream, reason) AS what, 'dlq' AS remedy
FROM dead_letters
WHERE status = 'parked' AND stream = ANY ($1::text[])
