-- Sales with unpublished changes, with their partitions, in random order: some may have to wait for a rebuild or for
-- their server, and must not block the others. $1 how many at most
SELECT id, partitions FROM sales WHERE published_revision < revision ORDER BY random() LIMIT $1
