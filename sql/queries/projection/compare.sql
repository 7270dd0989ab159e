-- Notes the orders of a month whose row differs from the log, is missing, or has no log. It is one statement, so it sees
-- a row and its events as they were written: together. The caller puts replay.sql where the braces are.
-- $1, $2 the sales from $1 to before $2
WITH replayed AS (
{{replay}}
), present AS (
    SELECT * FROM orders WHERE sale_id >= $1 AND sale_id < $2
)
INSERT INTO wrong_orders (sale_id, id)
SELECT sale_id, id
FROM replayed AS r FULL JOIN present AS p USING (sale_id, id)
WHERE (r.user_id, r.quantity, r.status, r.version, r.sequence, r.epoch, r.reserved_at, r.updated_at, r.reason, r.due, r.payment_reference, r.key_fingerprint)
   IS DISTINCT FROM
      (p.user_id, p.quantity, p.status, p.version, p.sequence, p.epoch, p.reserved_at, p.updated_at, p.reason, p.due, p.payment_reference, p.key_fingerprint)
