package ingress

import (
	"context"
	"fmt"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// endedProblem answers a purchase whose order has ended: the request that made an order never makes another one.
func problemOrderEnded(order uuid.UUID, status reservation.Status) *problem {
	return &problem{
		kind: kindOrderEnded, location: orderPath(order), orderID: order, orderStatus: status,
		detail: "This purchase made an order that is " + string(status) + " now, so nothing is reserved for you by it. " +
			"A purchase with another Idempotency-Key makes another order.",
	}
}

// answerReplay answers a purchase that Redis has answered before and whose order it still holds. Between the end of an order
// and the moment in which Redis hears of it, Postgres alone knows: so it is asked. The answer is the first one again, unless the
// order has ended, or may have been shown as more than reserved since. While Postgres cannot be asked, it says that it may be
// behind, and where a later version may have been shown and forgotten, nothing is said of the order.
//
// A repeat is rare. It takes a place and a connection from purchases, and none from those who look at their orders.
func (s *Server) answerReplay(c echo.Context, r reservation.Request, answer reservation.Answer) error {
	var found []reservation.Order
	err := s.inFlight.purchases.admit(func(c echo.Context) error {
		return s.queryPostgres(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			found, err = s.config.AwaitedOrders.FindOrders(ctx, []uuid.UUID{answer.Reservation.OrderID})
			return err
		})
	})(c)
	id := answer.Reservation.OrderID
	forgotten := s.versions.mayHaveForgotten(id)
	shown, wasShown := s.versions.recall(id)
	switch {
	case len(found) == 1 && (wasShown || forgotten || !found[0].Status.Live()):
		return s.answerWithOrder(c, http.StatusAccepted, r, answer, foundOrder{s.versions.latest(found[0]), false})
	case wasShown:
		return s.answerWithOrder(c, http.StatusAccepted, r, answer, foundOrder{shown, err != nil})
	case forgotten && err != nil:
		return fmt.Errorf("%w: order %s: postgres: %w; else: %w", problemStateUnknown, id, err, errVersionForgotten)
	}
	s.answerAccepted(c, r, answer.Reservation, err != nil)
	return nil
}
