-- Sets the state of the target $1 to $2, and forgets its failures. The process that delivers stops.
UPDATE relay_targets SET state = $2, fence = fence + 1, failures = 0, retry_at = NULL WHERE name = $1
