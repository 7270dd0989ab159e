-- A text that changes whenever orders, releases or sales do.
SELECT concat_ws(' ', (SELECT last_value FROM order_events_position_seq), (SELECT count(*) FROM releases), (SELECT sum(revision) FROM sales))
