-- Adds a target that has all events up to the position $5, unless there are already $6 targets.
-- $1 name, $2 URL, $3 secrets, $4 allow_private
-- The fence is random as that of relay/claim.sql.
INSERT INTO relay_targets (name, url, secrets, allow_private, position, fence)
SELECT $1, $2, $3, $4, $5, (random() * 4e18)::bigint WHERE (SELECT count(*) FROM relay_targets) < $6
