-- Commits a transaction that changes no row: its message goes to the log, and the commit waits for the disk. Nothing reads
-- the message.
SELECT pg_logical_emit_message(true, 'stampede', '')
