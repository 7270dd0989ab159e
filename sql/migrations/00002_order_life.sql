-- +goose Up

-- Until when a confirmed order has to be paid; NULL if its sale has no payment window.
ALTER TABLE orders ADD COLUMN expires_at timestamptz;
-- The payment provider's name for the payment of a paid order.
ALTER TABLE orders ADD COLUMN payment_reference text;

-- What was confirmed when nobody could pay gets its whole window now.
UPDATE orders AS o SET expires_at = now() + make_interval(secs => s.payment_window_seconds)
FROM sales AS s
WHERE s.id = o.sale_id AND s.payment_window_seconds > 0 AND o.status = 'confirmed';

-- Whose time to pay ends next.
CREATE INDEX orders_unpaid ON orders (expires_at) WHERE status = 'confirmed' AND expires_at IS NOT NULL;
-- A buyer's orders, newest first: ids are in the order of their making.
CREATE INDEX orders_of_user ON orders (user_id, id DESC);

-- Units of cancelled and expired orders that Redis has not been told of. A row comes with the event
-- that ends the order and goes when Redis has its units back.
CREATE TABLE releases (
    order_id   uuid PRIMARY KEY,
    sale_id    uuid NOT NULL,
    user_id    text NOT NULL,
    quantity   bigint NOT NULL CHECK (quantity > 0),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX releases_of_sale ON releases (sale_id, created_at);

-- When an ingress could last write to Postgres: one row. From now on, so that the time until the first
-- one comes counts as an outage.
CREATE TABLE pulse (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    seen_at timestamptz NOT NULL
);
INSERT INTO pulse (seen_at) VALUES (now());

-- Times in which nobody could pay. Deadlines were put off by as much.
CREATE TABLE outages (
    began_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL CHECK (ended_at > began_at),
    PRIMARY KEY (began_at, ended_at)
);

-- +goose Down
DROP TABLE outages, pulse, releases;
DROP INDEX orders_of_user, orders_unpaid;
ALTER TABLE orders DROP COLUMN payment_reference, DROP COLUMN expires_at;
