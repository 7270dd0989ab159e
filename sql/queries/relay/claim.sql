-- Makes the process $2 the one that delivers to the target $1, if that is active. Nobody else moves its position from now on.
UPDATE relay_targets SET fence = fence + 1, holder = $2 WHERE name = $1 AND state = 'active'
RETURNING name, url, state, position, fence, coalesce(holder, '') AS holder, secrets, allow_private, failures,
          coalesce(last_error, '') AS last_error, last_error_at, retry_at, delivered_at, created_at
