-- Returns the 50th and the 99th percentile of the milliseconds from the decision to the commit of the
-- orders that were decided at $1 or later. The server needs track_commit_timestamp.
SELECT p[1], p[2] FROM (
    SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (
        ORDER BY extract(epoch FROM pg_xact_commit_timestamp(xmin) - reserved_at) * 1000
    ) AS p
    FROM orders
    WHERE reserved_at >= $1
) AS delays
