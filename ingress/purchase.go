package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/internal/tracing"
	"stampede/ledger/problems"
	"stampede/reservation"
	"stampede/reservation/order"
)

// purchaseService takes purchases. It is written for speed because a crowd makes them: no reflection, no log line,
// pooled buffers.
type purchaseService struct {
	*core
	sales *saleService
}

// serve serves POST /v1/sales/{sale}/orders.
func (s *purchaseService) serve(c echo.Context) error {
	r := c.Request()
	arrival := arrived(c)
	began := arrival.Read
	if arrival.Known {
		s.metrics.wait.Observe(began.Sub(arrival.At).Seconds())
	}
	sale, ok := parseID(c.Param("sale"))
	if err := s.limits.admitAddress(&s.limits.purchases, r, began); err != nil {
		s.metrics.countPurchase(sale, verdictRateLimited, began)
		return err
	}
	user, err := s.auth.user(r)
	if err != nil {
		return err
	}
	if err := s.limits.admitUser(&s.limits.purchases, user, began); err != nil {
		s.metrics.countPurchase(sale, verdictRateLimited, began)
		return err
	}
	if !ok {
		return problemSaleNotFound
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	wait, waits := preferredWait(r.Header["Prefer"])
	quantity, items, err := readUnits(r)
	if err != nil {
		return err
	}
	if waits = waits && s.waitSlots.acquire(); waits {
		// While a slot is taken, announced outcomes are remembered: none is missed between the reservation and
		// the wait.
		defer s.waitSlots.release()
	}
	arrival = arrived(c) // the body may have come later than the head
	request := reservation.Request{
		Sale: sale, User: user, IdempotencyKey: key, Quantity: quantity, Items: items, Arrived: arrival.At,
		Client: arrival.Conn,
	}
	span := s.span(r)
	answer, err := s.reserve(detached(span), &request, arrival.Left, began)
	if span.On() {
		noteAnswer(span, answer)
	}
	if err != nil || answer.Verdict == reservation.Retired || answer.Verdict == reservation.UnknownSale {
		if answer, err = s.orPastAnswer(c, request, answer, err); err != nil {
			return err
		}
	}
	switch answer.Verdict {
	case reservation.SoldOut:
		// The answer to most of a crowd takes the shortest way.
		writeProblem(c, problemForSoldOut(answer.Of))
		if items != nil {
			clear(items)
			itemsPool.Put(items)
		}
		return nil
	case reservation.Reserved, reservation.Replayed:
	default:
		return problemForVerdict(answer, time.Now())
	}
	if waits {
		c.Response().Header()["Preference-Applied"] = preferenceApplied(wait)
		return s.answerAfterWait(c, request, answer, began.Add(wait))
	}
	if answer.Verdict == reservation.Replayed {
		return s.answerReplay(c, request, answer)
	}
	s.answerAccepted(c, &request, &answer, false)
	return nil
}

// reserve has Redis decide. It takes a slot after the body was read, so that clients who send slowly hold
// none. If the buyer had left by then, nothing is decided. Later it does not end when the buyer leaves: the answer is
// nearly due, and watching the connection would cost as much as the rest of the work.
func (s *purchaseService) reserve(
	ctx context.Context, r *reservation.Request, left bool, began time.Time,
) (answer reservation.Answer, err error) {
	if left || !s.inFlight.purchases.acquire() {
		s.metrics.countPurchase(r.Sale, verdictOverloaded, began)
		return answer, problemNotReserved
	}
	defer s.inFlight.purchases.release()
	err = problemNoSecret
	if s.receipts.signer.Load() != nil { // no purchase is accepted without a receipt
		answer, err = s.config.Reservations.Reserve(ctx, *r)
	}
	verdict := answer.Verdict
	if err != nil {
		verdict = verdictFor(err)
	}
	s.metrics.countPurchase(r.Sale, verdict, began)
	return answer, err
}

// span returns the span of a request.
func (s *purchaseService) span(r *http.Request) tracing.Span {
	if s.config.Tracer == nil {
		return tracing.Span{}
	}
	return tracing.Current(r.Context())
}

// noteAnswer notes what Redis has decided.
func noteAnswer(span tracing.Span, answer reservation.Answer) {
	span.Text("stampede.verdict", string(answer.Verdict))
	if answer.Reservation.OrderID != uuid.Nil {
		span.Text("stampede.order_id", answer.Reservation.OrderID.String())
	}
}

// detached returns a context with the span only: it does not end with the request.
func detached(span tracing.Span) context.Context { return span.In(context.Background()) }

// answerAccepted answers 202. With mayBeBehind the answer says that the order may be in a later state.
func (s *purchaseService) answerAccepted(
	c echo.Context, r *reservation.Request, answer *reservation.Answer, mayBeBehind bool,
) {
	h := c.Response().Header()
	setOrderHeaders(h, answer)
	h["Content-Type"] = jsonContent
	buf := scratchPool.Get().(*scratch)
	defer scratchPool.Put(buf)
	buf.out = s.appendReservation(buf.out[:0], r, answer, mayBeBehind)
	write(c, http.StatusAccepted, buf.out)
}

// setOrderHeaders sets the headers of an answer that is the buyer's order. Problems have none of them: a repeat may
// be answered by one before or after Redis knows that its order has ended.
func setOrderHeaders(h http.Header, answer *reservation.Answer) {
	h["Location"] = []string{orderPath(answer.Reservation.OrderID)}
	if answer.Verdict == reservation.Replayed {
		h["Idempotency-Replayed"] = headerTrue
	}
}

// appendReservation appends the body of a 202. It avoids the encoder because it runs once per accepted purchase.
func (s *purchaseService) appendReservation(
	dst []byte, r *reservation.Request, answer *reservation.Answer, mayBeBehind bool,
) []byte {
	held := &answer.Reservation
	dst = append(dst, `{"order_id":"`...)
	dst = order.AppendID(dst, held.OrderID)
	dst = append(dst, `","sale_id":"`...)
	dst = order.AppendID(dst, r.Sale)
	dst = append(dst, `","status":"reserved","quantity":`...)
	dst = strconv.AppendInt(dst, held.Quantity, 10)
	if answer.Of != nil {
		dst = append(append(dst, `,"items":`...), answer.Of.Units...)
	}
	price := s.sales.price(r.Sale)
	if amount := price.amount(held.Quantity, held.Lines); amount > 0 {
		dst = append(dst, `,"amount":`...)
		dst = strconv.AppendInt(dst, amount, 10)
		dst = append(dst, `,"currency":"`...)
		dst = append(append(dst, price.currency...), '"')
	}
	dst = append(dst, `,"reserved_at":"`...)
	dst = order.AppendTime(dst, held.ReservedAt)
	dst = append(dst, `","receipt":"`...)
	dst = s.receipts.append(dst, r, held)
	if mayBeBehind {
		return append(dst, "\",\"may_be_behind\":true}\n"...)
	}
	return append(dst, "\"}\n"...)
}

func orderPath(id uuid.UUID) string {
	const prefix = "/v1/orders/"
	var path [len(prefix) + 36]byte
	return string(order.AppendID(append(path[:0], prefix...), id))
}

// problemPastUnknown is for a purchase in a sale of which only Postgres knows the buyers, while it does not answer.
var problemPastUnknown = fixed(problem{
	Kind: problems.Unavailable, retryAfter: retrySoon,
	detail: "Nothing was reserved: the sale has ended. Whether this purchase was made before cannot be looked up now. " +
		"Retry after a moment.",
})

// orPastAnswer returns the answer to a purchase in a sale that Redis has retired or does not have, or whose answer is
// an error: that of Postgres if Redis has no buyers of the sale any more. If Redis does not have the sale at all, its
// orders are archived, or its keys were deleted.
func (s *purchaseService) orPastAnswer(
	c echo.Context, r reservation.Request, answer reservation.Answer, err error,
) (reservation.Answer, error) {
	isLost := errors.Is(err, reservation.ErrLostSale)
	switch {
	case err != nil && !isLost:
		return answer, err
	case answer.Verdict == reservation.Retired:
		return s.pastAnswer(c, r)
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	switch current, feedErr := s.sales.feed.get(ctx, r.Sale); {
	case feedErr == nil && current.sales[0].Retired:
		return s.pastAnswer(c, r)
	case isLost || errors.Is(feedErr, reservation.ErrSaleNotFound):
		return answer, err
	default: // it exists, or that is unknown
		return answer, problemUnavailable
	}
}

// pastAnswer returns the answer to a purchase in a sale that has ended and that Redis has retired, as Redis would have
// given it before. Only requests that come long after the end need it. They take a slot and a connection of purchases.
func (s *purchaseService) pastAnswer(c echo.Context, r reservation.Request) (answer reservation.Answer, err error) {
	err = s.inFlight.purchases.withSlot(func() error {
		return s.orders.query(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			answer, err = s.config.AwaitedOrders.PastAnswer(ctx, r)
			return err
		})
	})
	if err != nil {
		return reservation.Answer{}, fmt.Errorf("%w: sale %s: postgres: %w", problemPastUnknown, r.Sale, err)
	}
	return answer, nil
}

// problemStateUnknown is for a replay whose order may have been shown in a later version than can be found now.
var problemStateUnknown = fixed(problem{
	Kind: problems.Unavailable, retryAfter: retrySoon,
	detail: "This purchase has made an order, and its state cannot be looked up now. Retry after a moment: " +
		"the same request with the same Idempotency-Key cannot reserve twice.",
})

// problemOrderEnded answers a repeated purchase whose order has ended: the request that made an order never
// makes another one.
func problemOrderEnded(id uuid.UUID, status order.Status) *problem {
	return &problem{
		Kind: problems.OrderEnded, location: orderPath(id), orderID: id, orderStatus: status,
		detail: "The order of this request is " + string(status) + ", and the request does not make another one. " +
			"A purchase with another Idempotency-Key does.",
	}
}

// answerReplay answers a repeated purchase whose order Redis still holds. Postgres may know that the order has
// ended before Redis does, so it is asked. The answer is the first one, unless the order has ended or may have
// been shown in a later state. While Postgres does not answer, the reply says that it may be behind; if a
// later version may have been shown and forgotten, it is problemStateUnknown.
//
// Replays are rare. They take a slot and a connection of purchases, so that none is taken from buyers who look
// at their orders.
func (s *purchaseService) answerReplay(c echo.Context, r reservation.Request, answer reservation.Answer) error {
	var found []order.Order
	id := answer.Reservation.OrderID
	err := s.inFlight.purchases.withSlot(func() error {
		return s.orders.query(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			found, err = s.config.AwaitedOrders.FindOrders(ctx, []uuid.UUID{id})
			return err
		})
	})
	forgotten := s.orders.versions.mayHaveForgotten(id)
	shown, wasShown := s.orders.versions.recall(id)
	switch {
	case len(found) == 1 && (wasShown || forgotten || !found[0].Status.Live()):
		return s.answerWithOrder(c, http.StatusAccepted, r, answer, foundOrder{s.orders.versions.latest(found[0]), false})
	case wasShown:
		return s.answerWithOrder(c, http.StatusAccepted, r, answer, foundOrder{shown, err != nil})
	case forgotten && err != nil:
		return fmt.Errorf("%w: order %s: postgres: %w; else: %w", problemStateUnknown, id, err, errVersionForgotten)
	}
	s.answerAccepted(c, &r, &answer, err != nil)
	return nil
}

var problemVoided = fixed(problem{
	Kind: problems.Unavailable, retryAfter: retrySoon,
	detail: "The accepted order was lost: nothing is reserved for you. Retry after a moment.",
})

// preferenceApplied is the header that tells the client how long its purchase may wait.
func preferenceApplied(wait time.Duration) []string {
	return []string{"wait=" + strconv.Itoa(int(wait/time.Second))}
}

// answerAfterWait answers an accepted purchase once its order is in Postgres: 201, or the problem by which it was
// refused or has ended meanwhile. After until, or when the server stops, it is 202 as without waiting.
//
// The request waits without a slot of inFlight; the caller holds one of waitSlots.
func (s *purchaseService) answerAfterWait(
	c echo.Context, r reservation.Request, answer reservation.Answer, until time.Time,
) error {
	// Extends the server's accept.WriteTimeout. It fails if the connection has no deadlines.
	_ = http.NewResponseController(c.Response()).SetWriteDeadline(until.Add(accept.WriteTimeout))
	// A replayed order may be in Postgres for long, so it is looked up immediately; a new one is not there yet.
	w := s.waiters.add(answer.Reservation.OrderID, 1, answer.Verdict == reservation.Replayed)
	defer s.waiters.remove(w)
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case o := <-w.updates:
		return s.answerWithOrder(c, http.StatusCreated, r, answer, foundOrder{Order: s.orders.versions.latest(o)})
	case <-timer.C:
		if o, known := s.findLost(c, r, answer.Reservation); known {
			return s.answerWithOrder(c, http.StatusCreated, r, answer, foundOrder{Order: s.orders.versions.latest(o)})
		}
	case <-s.waitsEnd:
	case <-c.Request().Context().Done():
	}
	if answer.Verdict == reservation.Replayed {
		return s.answerReplay(c, r, answer)
	}
	s.answerAccepted(c, &r, &answer, false)
	return nil
}

// findLost returns what became of an order that Redis has lost while its buyer waited: then no worker will ever
// announce it. It is not known if Redis still holds the order, or if Redis or Postgres does not answer.
func (s *purchaseService) findLost(
	c echo.Context, r reservation.Request, held order.Reservation,
) (o order.Order, known bool) {
	err := s.inFlight.purchases.withSlot(func() (err error) {
		ctx := c.Request().Context()
		if _, err = s.orders.findReserved(ctx, held.OrderID, r.User); !errors.Is(err, order.ErrNotFound) {
			return problemOrderUndecided
		}
		err = s.orders.query(ctx, orderTimeout, func(ctx context.Context) (err error) {
			o, err = s.config.AwaitedOrders.FindByReceipt(ctx, newReceipt(&r, &held))
			return err
		})
		return err
	})
	return o, err == nil
}

// answerWithOrder answers a purchase whose order is in Postgres: with the status while the buyer has the
// units, otherwise with a problem.
func (s *purchaseService) answerWithOrder(
	c echo.Context, status int, r reservation.Request, answer reservation.Answer, o foundOrder,
) error {
	switch {
	case o.Status == order.StatusVoided:
		return problemVoided
	case o.Status == order.StatusRejected && answer.Verdict == reservation.Reserved:
		return problemForRejection(o.Order)
	case !o.Status.Live():
		return problemOrderEnded(o.ID, o.Status)
	}
	view := o.view()
	view.Receipt = string(s.receipts.append(nil, &r, &answer.Reservation))
	setOrderHeaders(c.Response().Header(), &answer)
	return writeJSON(c, status, view)
}

// problemForRejection is the problem of an order that Redis has just reserved and Postgres has refused.
func problemForRejection(o order.Order) *problem {
	switch o.Reason {
	case order.RejectedSoldOut:
		return problemSoldOut
	case order.RejectedAlreadyPurchased:
		// The id of the other order is not known here.
		return &problem{
			Kind: problems.AlreadyPurchased, detail: "A buyer may have one order per sale. GET /v1/orders lists yours.",
		}
	}
	return problemOrderEnded(o.ID, o.Status)
}
