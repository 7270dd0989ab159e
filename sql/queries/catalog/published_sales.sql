-- The sales of which Redis was told, ever, and among how many partitions each lives.
SELECT id, partitions FROM sales WHERE published_revision > 0
