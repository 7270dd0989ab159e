-- Makes the next revision of a sale, and its event.
-- $1 id, $2 state, $3 stock, $4 type of the event, $5 its data, with the name if it changes, and with all items if
-- their stock or names do,
-- $6 idempotency key or null, $7 the operator, or null for that of the request to lower the stock which the change
-- fulfils, if it is one (catalog/find_lowering.sql)
-- Returns: the revision.
WITH sale AS (
    UPDATE sales SET state = $2, stock = $3, name = coalesce($5::jsonb ->> 'name', name), revision = revision + 1 WHERE id = $1
    RETURNING id, revision
), its_items AS (
    UPDATE sale_items AS i SET stock = (changed ->> 'stock')::bigint, name = changed ->> 'name'
    FROM jsonb_array_elements($5::jsonb -> 'items') AS changed
    WHERE i.sale_id = $1 AND i.code = changed ->> 'code'
)
INSERT INTO sale_events (sale_id, revision, type, data, idempotency_key, operator)
SELECT id, revision, $4, $5, $6,
       coalesce($7, (SELECT operator FROM sale_events AS asked WHERE asked.sale_id = $1 AND asked.revision = ($5::jsonb ->> 'lowering')::bigint))
FROM sale
RETURNING revision
