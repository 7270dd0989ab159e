-- Whether the order $1 may come from a dead letter: one that is parked, also a whole entry that cannot be read, or was replayed
-- in the last $2 seconds, so that its new entry in the stream is younger than the order.
SELECT EXISTS (
    SELECT FROM dead_letters
    WHERE (status = 'parked' OR status = 'replayed' AND updated_at > now() - make_interval(secs => $2)) AND coalesce(order_id, $1) = $1::uuid)
