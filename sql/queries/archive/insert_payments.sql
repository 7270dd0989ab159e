-- Brings the payments of a file back. {{values}} as in insert_events.sql. A payment that was reported again since stays as it is.
INSERT INTO payment_events ({{columns}})
SELECT {{values}} FROM (
    SELECT * FROM file_payments AS a WHERE NOT EXISTS (SELECT FROM payment_events AS p WHERE p.reference = a.reference) ORDER BY position DESC
) AS events
