-- The position of the event of the revision $2 of the sale $1; none if it came from another database.
SELECT position FROM sale_events WHERE sale_id = $1 AND revision = $2 AND position > 0
