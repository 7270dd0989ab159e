-- The columns of order_events, in their order.
SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = 'order_events'::regclass AND attnum > 0 AND NOT attisdropped
