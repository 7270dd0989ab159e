-- Brings the events of a file back. Those that were not deleted stay. {{values}} are {{columns}}; for events of another
-- database without the position, which is -next_position() then: unique, below that of every target of the relay, and
-- in the order of the file, because the last event comes first.
INSERT INTO order_events ({{columns}}) OVERRIDING SYSTEM VALUE
SELECT {{values}} FROM (SELECT * FROM file_events ORDER BY position DESC) AS events
ON CONFLICT (sale_id, order_id, version) DO NOTHING
