-- Brings the events of a file back. Those that were not deleted stay.
INSERT INTO order_events ({{columns}}) OVERRIDING SYSTEM VALUE
SELECT {{columns}} FROM archived_events
ON CONFLICT (sale_id, order_id, version) DO NOTHING
