-- The payments $1 in their present state.
SELECT reference, version, position, order_id, sale_id, amount, currency, state, coalesce(reason, '') AS reason, received_at, updated_at, data
FROM unnest($1::text[]) AS wanted CROSS JOIN LATERAL (
    -- One by one, by the index: as in ledger/find_orders.sql.
    SELECT * FROM payments WHERE reference = wanted LIMIT 1
) AS found
