-- Sales of which Redis has not been told everything, in any order: some of them may have to wait for
-- a rebuild, and must not keep the others from their turn.
-- $1 how many at most
SELECT id FROM sales WHERE published_revision < revision ORDER BY random() LIMIT $1
