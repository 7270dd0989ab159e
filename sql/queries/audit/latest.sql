-- The newest recorded audit.
SELECT least(greatest(at, 'epoch'), '9999-12-31') AS at, coalesce(operator, '') AS operator, broken, unchecked
FROM audits
ORDER BY id DESC
LIMIT 1
