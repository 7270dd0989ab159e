-- Payments in the order of their latest events, after the position $1: at most $2, which is at most 1001, of the sale $3 if that is not NULL.
-- $4 are the open states that are wanted, and $5 the types of the latest events of those that are not open.
--
-- Each state is read by an index of its own, also with a plan that is kept for all parameters: a range of types, and not one type, so that no
-- index of positions alone has its order; OFFSET 0, so that later events are looked for one by one; and a number as limit, without which the
-- plan would be one for many rows.
WITH found AS MATERIALIZED (
    SELECT listed.* FROM unnest($4::text[]) AS wanted CROSS JOIN LATERAL (
        (SELECT * FROM (SELECT reference, position FROM open_payments WHERE $3::uuid IS NULL AND state = wanted AND position > $1 ORDER BY position LIMIT 1001) AS first LIMIT $2)
        UNION ALL
        (SELECT * FROM (SELECT reference, position FROM open_payments WHERE sale_id = $3 AND state = wanted AND position > $1 ORDER BY position LIMIT 1001) AS first LIMIT $2)
    ) AS listed
    UNION ALL
    SELECT listed.* FROM unnest($5::text[]) AS wanted CROSS JOIN LATERAL (
        (SELECT * FROM (SELECT reference, position FROM payment_events AS e WHERE $3::uuid IS NULL AND (type, position) > (wanted, $1) AND type <= wanted
         AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1 OFFSET 0) ORDER BY type, position LIMIT 1001) AS first LIMIT $2)
        UNION ALL
        (SELECT * FROM (SELECT reference, position FROM payment_events AS e WHERE sale_id = $3 AND (type, position) > (wanted, $1) AND type <= wanted
         AND NOT EXISTS (SELECT FROM payment_events AS later WHERE later.reference = e.reference AND later.version = e.version + 1 OFFSET 0) ORDER BY type, position LIMIT 1001) AS first LIMIT $2)
    ) AS listed
)
SELECT found.reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at, data
FROM (SELECT reference FROM found ORDER BY position LIMIT $2) AS page CROSS JOIN LATERAL (
    -- One by one, by the index: as in ledger/find_orders.sql.
    SELECT * FROM payments WHERE reference = page.reference LIMIT 1
) AS found
ORDER BY position
