-- The position of the first event at or after the time $1; NULL if there is none. It reads all events.
SELECT least((SELECT min(position) FROM order_events WHERE occurred_at >= $1 AND position > 0),
             (SELECT min(position) FROM sale_events WHERE occurred_at >= $1 AND position > 0),
             (SELECT min(position) FROM payment_events WHERE occurred_at >= $1 AND position > 0))
