-- The orders as their log has them: the one definition of what follows from it. differences.sql compares the rows with
-- it, for the audit and for a rebuild, replace.sql writes it, and archive/scratch.sql makes those of a file that is audited.
-- The caller puts where the braces are: the table of the events, with a condition of their sales, and each history that
-- an order can have, with the status to which it leads.
--
-- damage: why no row follows from the log of the order, or NULL. Such an order blocks its sale.
SELECT sale_id, id, user_id, quantity, status, version, sequence, epoch, reserved_at, updated_at, reason, due, pay_from, payment_reference, key_fingerprint, lines,
       CASE WHEN first <> 2 OR version <> events + 1 OR version > 4 THEN format('the log of the order has %s of the versions from 2 to %s', events, version)
            WHEN status IS NULL THEN format('the log of the order has an impossible history: %s', history)
            WHEN reserved_at IS NULL THEN 'the log of the order has no reservation'
            WHEN reservations > 1 THEN 'the log of the order has several reservations'
            WHEN NOT objects THEN 'an event of the order has data that are no object'
            WHEN sequence IS NULL OR epoch IS NULL THEN 'the log of the order has no place in the sale'
            WHEN user_id <> last_user OR quantity <> last_quantity OR lines <> last_lines OR having_lines NOT IN (0, events) OR payment_reference <> last_reference THEN 'the events of the order are of several users, quantities or payments'
            WHEN CASE WHEN lines IS NOT NULL THEN quantity <> (SELECT coalesce(sum(units), 0) FROM order_lines(lines)) END THEN format('the quantity of the order is %s, and its lines are %s', quantity, lines)
       END AS damage
FROM (
    SELECT sale_id, order_id AS id, count(*) AS events, min(version) AS first, max(version) AS version,
           -- An order with a later version is damaged (order.LastVersion). An ordered aggregate would sort the events of each order.
           concat_ws(' ', max(type) FILTER (WHERE version = 2), max(type) FILTER (WHERE version = 3), max(type) FILTER (WHERE version = 4)) AS history,
           coalesce(max(occurred_at) FILTER (WHERE version = 4), max(occurred_at) FILTER (WHERE version = 3), max(occurred_at)) AS updated_at,
           min(user_id) AS user_id, max(user_id) AS last_user, min(quantity) AS quantity, max(quantity) AS last_quantity,
           min(lines) AS lines, max(lines) AS last_lines, count(lines) AS having_lines,
           max(reserved_at) FILTER (WHERE version = 2) AS reserved_at, greatest(count(reserved_at), count(sequence), count(epoch), count(due), count(key_fingerprint)) + count(pay_from) FILTER (WHERE version > 2) AS reservations,
           max(sequence) FILTER (WHERE version = 2) AS sequence, max(epoch) FILTER (WHERE version = 2) AS epoch,
           max(due) FILTER (WHERE version = 2) AS due, max(pay_from) FILTER (WHERE version = 2) AS pay_from, max(key_fingerprint) FILTER (WHERE version = 2) AS key_fingerprint,
           bool_and(jsonb_typeof(data) = 'object') AS objects,
           -- An operator's reason for a cancellation is in the log only.
           max(data ->> 'reason') FILTER (WHERE version = 2) AS reason,
           min(data ->> 'reference') AS payment_reference, max(data ->> 'reference') AS last_reference
    FROM {{events}} GROUP BY sale_id, order_id
) AS logged LEFT JOIN (VALUES {{histories}}) AS possible (history, status) USING (history)
