-- Sales with unpublished changes, in random order: some may have to wait for a rebuild, and must
-- not block the others. $1 how many at most
SELECT id FROM sales WHERE published_revision < revision ORDER BY random() LIMIT $1
