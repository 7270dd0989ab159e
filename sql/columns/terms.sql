-- The terms of a sale that never change, as reservation.TermsView reads them. The query has the row of the sale as s.
s.per_order_limit, s.opens_at, s.closes_at, s.payment_window_seconds, s.payment_grace_seconds, s.payments_per_second, s.unit_price, s.currency
