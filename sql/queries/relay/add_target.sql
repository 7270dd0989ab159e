-- Adds a target that has all events up to the position $5, unless there are already $6 targets.
-- $1 name, $2 URL, $3 secrets, $4 allow_private
INSERT INTO relay_targets (name, url, secrets, allow_private, position)
SELECT $1, $2, $3, $4, $5 WHERE (SELECT count(*) FROM relay_targets) < $6
