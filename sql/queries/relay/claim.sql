-- Makes the process $2 the one that delivers to the target $1, if that is active. Nobody else moves its position from now on.
-- The fence is random, because a counter starts over with a target that is removed and added again: then a process of the
-- removed one could have the fence of the new one. Operators' changes add 1.
UPDATE relay_targets SET fence = (random() * 4e18)::bigint, holder = $2 WHERE name = $1 AND state = 'active'
RETURNING name, url, state, position, fence, coalesce(holder, '') AS holder, secrets, allow_private, failures,
          coalesce(last_error, '') AS last_error, last_error_at, retry_at, delivered_at, created_at
