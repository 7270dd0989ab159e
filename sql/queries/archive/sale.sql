-- The sale $1 as its file has it, and what became of it: its row; those of its items, NULL without any; its revision and
-- layout; whether it is archived, whether its units are offered by rank, and the path and the checksum of that file.
SELECT to_jsonb(s) AS row, (SELECT jsonb_agg(to_jsonb(i) ORDER BY item) FROM sale_items AS i WHERE sale_id = $1) AS items,
       revision, partitions, shards, archived_at IS NOT NULL AS archived, EXISTS (SELECT FROM draws WHERE sale_id = $1) AS drawn,
       coalesce(archive ->> 'path', '') AS path, coalesce(archive ->> 'sha256', '') AS sha256, coalesce(archive ? 'deleted_at', false) AS deleted, coalesce(archive ? 'remembered_at', false) AS remembered
FROM sales AS s WHERE id = $1
