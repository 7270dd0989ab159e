-- Sales of which Redis has not been told everything.
-- $1 how many at most
SELECT id FROM sales WHERE published_revision < revision ORDER BY id LIMIT $1
