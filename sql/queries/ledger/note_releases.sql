-- Records the results of releases that the caller has taken (take_releases.sql), all of the sale $1.
--
-- $2  the orders whose units Redis has, or never gave out: finished
-- $3  the orders whose sale is not in Redis: finished if the sale has ended, because a rebuilt Redis does not
--     count them
-- $4  the orders that Redis refused
-- $5  the orders whose shard could not be reached: retried a second later, so that others of the sale come first
--
-- Units that return may be offered (draws/note_due.sql). Of a waiting list, the last place may be one that is left: no more live
-- ones than had their turn.
--
-- The others are retried after 1 s, 2 s, 4 s and so on up to a minute. Returns how many are retried.
WITH over AS MATERIALIZED (
    SELECT state = 'ended' OR coalesce(closes_at <= now(), false) AS over FROM sales WHERE id = $1
), done AS (
    DELETE FROM releases WHERE order_id = ANY ($2::uuid[]) OR order_id = ANY ($3::uuid[]) AND (SELECT over FROM over)
), again AS (
    UPDATE releases SET refusals = refusals + 1, again_at = clock_timestamp() + make_interval(secs => least(power(2, least(refusals, 10)), 60))
    WHERE order_id = ANY ($4::uuid[]) OR order_id = ANY ($3::uuid[]) AND (SELECT over FROM over) IS NOT TRUE
    RETURNING order_id
), later AS (
    UPDATE releases SET again_at = clock_timestamp() + interval '1 second' WHERE order_id = ANY ($5::uuid[]) RETURNING order_id
), due AS (
    INSERT INTO offers_due (sale_id) SELECT sale_id FROM draws AS d WHERE sale_id = $1 OR kind = 'waitlist' AND entries_id = $1 AND EXISTS (
        SELECT FROM (SELECT '' AS item, sold FROM sales WHERE id = $1 AND items = 0 UNION ALL SELECT item, sold FROM sale_items WHERE sale_id = $1) AS places
        WHERE sold <= (SELECT max(rank) + 1 FROM draw_offers WHERE sale_id = d.sale_id AND item = places.item))
    ON CONFLICT (sale_id) DO UPDATE SET turn = DEFAULT
)
SELECT (SELECT count(*) FROM again) + (SELECT count(*) FROM later)
