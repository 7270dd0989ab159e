-- D5: ranks whose turn was not theirs, or that were skipped for no reason. The places of the ranks of a draw are compared
-- in upkeep/audit/draws.go.
--
-- The order of a holder may take a while to Postgres, or be lost with Redis: such a skip is only wrong later.
WITH offers AS MATERIALIZED (
    SELECT d.entries_id, d.kind, d.version, o.*, e.user_id, e.status, e.sequence, e.lines
    FROM draws AS d JOIN audit_sales USING (sale_id) JOIN draw_offers AS o USING (sale_id)
    LEFT JOIN orders AS e ON e.sale_id = d.entries_id AND e.id = o.entry_id
)
SELECT sale_id, NULL::uuid AS order_id, user_id, format('rank %s%s %s', rank, ' of the item ' || nullif(item, ''), wrong) AS what, 'draw' AS remedy
FROM (
    SELECT *, CASE
        WHEN kind = 'draw' AND entry_id IS DISTINCT FROM (
            SELECT encode(substring(ids FROM (16 * (place % 1024) + 1)::int FOR 16), 'hex')::uuid
            FROM draw_chunks AS c WHERE c.sale_id = o.sale_id AND c.chunk = place / 1024)
            THEN format('names the entry %s, which is not at its place %s', entry_id, place)
        WHEN kind = 'waitlist' AND sequence <> place THEN format('names the entry %s with the place %s, and its place is %s', entry_id, place, sequence)
        WHEN kind = 'waitlist' AND place < max(place) OVER before THEN (
            -- The entry may have come to Postgres late. It was there before a turn of a later place if it came there before that
            -- entry, or a minute before the turn, whose list may have been read earlier. A turn that was repeated after Redis was
            -- lost has another time.
            SELECT format('is that of place %s, after place %s', o.place, early.place)
            FROM draw_offers AS early
            JOIN order_events AS came ON came.sale_id = o.entries_id AND came.order_id = o.entry_id AND came.version = 2
            LEFT JOIN order_events AS theirs ON theirs.sale_id = o.entries_id AND theirs.order_id = early.entry_id AND theirs.version = 2
            WHERE early.sale_id = o.sale_id AND early.item = o.item AND early.rank < o.rank AND early.place > o.place
              AND (early.offered_at = o.offered_at OR came.position < theirs.position OR came.occurred_at < early.offered_at - interval '1 minute' AND NOT EXISTS (
                  SELECT FROM sale_events AS r WHERE r.sale_id = o.sale_id AND r.type = 'SaleRebuilt' AND r.occurred_at BETWEEN came.occurred_at AND early.offered_at))
            ORDER BY early.rank LIMIT 1)
        WHEN user_id IS NULL THEN NULL -- the entry is archived
        WHEN item <> coalesce(left(lines, 1), '') THEN format('names the entry %s, which is of another item', entry_id)
        WHEN reason = 'entry-cancelled' AND status <> 'cancelled' THEN format('was skipped because its entry was cancelled, which is %s', status)
        WHEN reason = 'entry-cancelled' AND EXISTS (
            SELECT FROM orders AS own WHERE own.sale_id = o.sale_id AND own.user_id = o.user_id AND is_live(own.status)
                -- As of an offer to this entry: order.OfferFingerprint, but for its last character.
                AND left(own.key_fingerprint, 21) = left(translate(encode(substring(sha256(convert_to('stampede offer ' || entry_id, 'UTF8')) FOR 16), 'base64'), '+/', '-_'), 21))
            THEN 'was skipped because its entry was cancelled, and it was offered: the user has the order'
        WHEN reason = 'already-purchased' AND offered_at < now() - interval '15 minutes'
            AND NOT EXISTS (SELECT FROM orders AS own WHERE own.sale_id = o.sale_id AND own.user_id = o.user_id)
            AND NOT EXISTS (SELECT FROM audit_buyers AS b WHERE b.sale_id = o.sale_id AND b.user_id = o.user_id)
            AND NOT EXISTS (SELECT FROM sale_events AS r WHERE r.sale_id = o.sale_id AND r.type = 'SaleRebuilt' AND r.occurred_at > o.offered_at)
            THEN 'was skipped because the user has an order, and there is none'
        WHEN reason = 'already-purchased' AND version > 1 AND NOT EXISTS (
            SELECT FROM sale_events AS f WHERE f.sale_id = o.sale_id AND f.type = 'DrawFrozen' AND f.data -> 'goods' -> 'holders' @> to_jsonb(place))
            THEN 'was skipped because the user has an order, and had none when the list was frozen'
        WHEN reason NOT IN ('entry-cancelled', 'already-purchased') THEN format('was skipped for the unknown reason %s', left(reason, 100))
        WHEN EXISTS (SELECT FROM orders AS own WHERE own.sale_id = o.sale_id AND own.id = o.order_id AND own.user_id <> o.user_id)
            THEN format('is that of the entry %s, and its order %s is of another user', entry_id, order_id)
    END AS wrong
    FROM offers AS o
    WINDOW before AS (PARTITION BY sale_id, item ORDER BY rank ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
) AS checked
WHERE wrong IS NOT NULL
UNION ALL
SELECT d.sale_id, NULL, NULL, format('%s ranks were offered and %s skipped, and the draw counts %s and %s', o.offered, o.skipped, d.offered, d.skipped), 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id)
CROSS JOIN LATERAL (SELECT count(order_id) AS offered, count(reason) AS skipped FROM draw_offers WHERE sale_id = d.sale_id) AS o
WHERE (d.offered, d.skipped) <> (o.offered, o.skipped)
UNION ALL
SELECT d.sale_id, NULL, NULL, CASE WHEN d.voided_at IS NULL THEN 'ranks were offered before the entries were ranked' ELSE 'ranks of a void draw were offered' END, 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id)
WHERE d.kind = 'draw' AND (d.ranked_at IS NULL OR d.voided_at IS NOT NULL) AND EXISTS (SELECT FROM draw_offers WHERE sale_id = d.sale_id)
UNION ALL
SELECT d.sale_id, NULL, NULL, format('what is left is for everybody, and %s of %s ranks had their turn', d.offered + d.skipped, coalesce(d.entries, 0)), 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id) JOIN sales AS g ON g.id = d.sale_id
WHERE d.kind = 'draw' AND NOT g.offers_only AND (d.ranked_at IS NULL OR d.offered + d.skipped < d.entries)
UNION ALL
SELECT d.sale_id, NULL, NULL, format('ranks up to %s had their turn, and %s are recorded', o.last, o.turns), 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id) CROSS JOIN LATERAL (SELECT max(rank) AS last, count(*) AS turns FROM draw_offers WHERE sale_id = d.sale_id GROUP BY item) AS o
WHERE d.kind = 'waitlist' AND o.turns <> o.last + 1
UNION ALL
-- Orders of offered units without an offer. A worker that dies records it when it, or another one, works again.
SELECT d.sale_id, own.id, own.user_id, 'it is of a unit that was offered, and no turn has it', 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id) JOIN sales AS g ON g.id = d.sale_id JOIN orders AS own ON own.sale_id = d.sale_id
WHERE is_live(own.status) AND own.updated_at < now() - interval '15 minutes'
  AND NOT EXISTS (SELECT FROM draw_offers AS had WHERE had.sale_id = d.sale_id AND had.order_id = own.id)
  AND (g.offers_only OR own.key_fingerprint ~ '[BRhx]$') -- as of an offer: order.KindOf
UNION ALL
-- An entry may come to Postgres after one with a later place.
SELECT d.sale_id, NULL, e.user_id, format('the entry %s at place %s was passed over: place %s had its turn at %s', e.id, e.sequence, later.place,
           to_char(later.offered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')), 'draw'
FROM draws AS d JOIN audit_sales USING (sale_id)
CROSS JOIN LATERAL (SELECT item, max(place) AS place FROM draw_offers WHERE sale_id = d.sale_id GROUP BY item) AS last
JOIN orders AS e ON e.sale_id = d.entries_id AND e.status = 'confirmed' AND e.sequence < last.place AND coalesce(left(e.lines, 1), '') = last.item
CROSS JOIN LATERAL (
    SELECT place, offered_at FROM draw_offers WHERE sale_id = d.sale_id AND item = last.item AND place > e.sequence ORDER BY rank DESC LIMIT 1
) AS later
WHERE d.kind = 'waitlist' AND NOT EXISTS (SELECT FROM draw_offers WHERE sale_id = d.sale_id AND entry_id = e.id)
  AND e.updated_at < later.offered_at - interval '1 minute'
