-- The draws and waiting lists of which one of the sales $1 is the goods or the entries.
SELECT sale_id, entries_id, kind, freeze_seconds, parties FROM draws WHERE sale_id = ANY ($1) OR entries_id = ANY ($1)
