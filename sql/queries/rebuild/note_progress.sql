-- Records that a rebuild is alive and where it stands, and removes those that have been silent for a minute.
-- $1 id of the rebuild, $2 partition, $3 the sale or null for the partition, $4 reason, $5 who, $6 for how many
-- milliseconds it has run, $7 step, $8 sales that are done, $9 of how many
WITH dead AS (
    DELETE FROM rebuilds WHERE beat_at < now() - interval '1 minute' AND id <> $1
)
INSERT INTO rebuilds (id, partition, sale_id, reason, process, began_at, step, sales_done, sales_total)
VALUES ($1, $2, $3, $4, $5, now() - make_interval(secs => $6 / 1000.0), $7, $8, $9)
ON CONFLICT (id) DO UPDATE SET step = excluded.step, sales_done = excluded.sales_done, sales_total = excluded.sales_total, beat_at = now()
