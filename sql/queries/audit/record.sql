-- Stores the verdict of a whole audit and deletes all but the newest 1000.
--
-- $1 the operator, or NULL
-- $2 the broken promises, $3 those that could not be checked completely
WITH recorded AS (
    INSERT INTO audits (operator, broken, unchecked) VALUES ($1, $2, $3)
)
DELETE FROM audits WHERE id <= (SELECT id FROM audits ORDER BY id DESC OFFSET 999 LIMIT 1) -- without the new one
