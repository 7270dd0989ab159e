-- The columns of order_events and of payment_events, in their order.
SELECT array_agg(attname::text ORDER BY attnum) FILTER (WHERE attrelid = 'order_events'::regclass) AS orders,
       array_agg(attname::text ORDER BY attnum) FILTER (WHERE attrelid = 'payment_events'::regclass) AS payments
FROM pg_attribute WHERE attrelid IN ('order_events'::regclass, 'payment_events'::regclass) AND attnum > 0 AND NOT attisdropped
