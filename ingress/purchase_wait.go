package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"stampede/internal/accept"
	"stampede/reservation"
	"stampede/reservation/order"
	"stampede/reservation/problems"
)

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
	err := s.inFlight.purchases.hold(func() (err error) {
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
