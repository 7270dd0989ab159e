package ingress

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

var problemVoided = fixed(problem{
	kind: kindUnavailable, retryAfter: retrySoon,
	detail: "The order was accepted and could not be kept: nothing is reserved for you. Try again in a moment.",
})

// answerEnd answers an accepted purchase when its order has its end in Postgres: 201, or the problem because of which
// it was refused or is over after all. If that takes longer than until, or the server is stopping, it is 202, as without waiting.
//
// Those who wait take no place in room, but one among the waiting, which the caller has taken.
func (s *Server) answerAfterWait(c echo.Context, r reservation.Request, answer reservation.Answer, until time.Time) error {
	// The server's writeTimeout is for requests that do not wait. An error means that the connection has none.
	_ = http.NewResponseController(c.Response()).SetWriteDeadline(until.Add(writeTimeout))
	// Of what was reserved just now nothing is in Postgres yet; a replay may be of an order that has long been there.
	w := s.waiters.add(answer.Reservation.OrderID, 1, answer.Verdict == reservation.Replayed)
	defer s.waiters.remove(w)
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case order := <-w.updates:
		return s.answerWithOrder(c, http.StatusCreated, r, answer, foundOrder{Order: s.versions.latest(order)})
	case <-timer.C:
		if order, known := s.findLost(c, r, answer.Reservation); known {
			return s.answerWithOrder(c, http.StatusCreated, r, answer, foundOrder{Order: s.versions.latest(order)})
		}
	case <-s.waitsEnd:
	case <-c.Request().Context().Done():
	}
	if answer.Verdict == reservation.Replayed {
		return s.answerReplay(c, r, answer)
	}
	s.answerAccepted(c, r, answer.Reservation, false)
	return nil
}

// lostMeanwhile returns what became of an order that Redis holds no more, though nothing was heard of it while its buyer
// waited. It asks Postgres only if that is so, and is not for certain then either: known is false if nobody can tell now.
func (s *Server) findLost(c echo.Context, r reservation.Request, held reservation.Reservation) (order reservation.Order, known bool) {
	err := s.inFlight.purchases.admit(func(c echo.Context) (err error) {
		ctx := c.Request().Context()
		if _, err = s.findReserved(ctx, held.OrderID, r.User); !errors.Is(err, reservation.ErrOrderNotFound) {
			return problemFateUndecided
		}
		err = s.queryPostgres(ctx, orderTimeout, func(ctx context.Context) (err error) {
			order, err = s.config.AwaitedOrders.FindByReceipt(ctx, receiptOf(r, held))
			return err
		})
		return err
	})(c)
	return order, err == nil
}

// answerOrder answers a purchase whose order is in Postgres. It is a success only while the buyer has what was bought.
func (s *Server) answerWithOrder(c echo.Context, status int, r reservation.Request, answer reservation.Answer, order foundOrder) error {
	switch {
	case order.Status == reservation.StatusVoided:
		return problemVoided
	case order.Status == reservation.StatusRejected && answer.Verdict == reservation.Reserved:
		return problemOfRejection(order.Order)
	case !order.Status.Live():
		return problemOrderEnded(order.ID, order.Status)
	}
	view := order.view()
	view.Receipt = string(s.appendReceipt(nil, r, answer.Reservation))
	c.Response().Header()["Location"] = []string{orderPath(order.ID)}
	return writeJSON(c, status, view)
}

// refusedLater is the problem for an order that Redis had admitted just now and Postgres has not.
func problemOfRejection(order reservation.Order) *problem {
	switch order.Reason {
	case reservation.RejectedSoldOut:
		return problemSoldOut
	case reservation.RejectedAlreadyPurchased:
		// Which one that is was not asked for.
		return &problem{kind: kindAlreadyPurchased, detail: "One order per buyer and sale. GET /v1/orders lists yours."}
	}
	return problemOrderEnded(order.ID, order.Status)
}

// preferenceApplied tells the client for how long it was ready to wait.
func preferenceApplied(wait time.Duration) []string {
	return []string{"wait=" + strconv.Itoa(int(wait/time.Second))}
}
