package ingress

import (
	"context"
	"fmt"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
	"stampede/reservation/order"
)

// problemStateUnknown is for a replay whose order may have been shown in a later version than can be found now.
var problemStateUnknown = fixed(problem{
	kind: kindUnavailable, retryAfter: retrySoon,
	detail: "This purchase has made an order, and its state cannot be looked up now. Retry after a moment: " +
		"the same request with the same Idempotency-Key cannot reserve twice.",
})

// problemOrderEnded answers a repeated purchase whose order has ended: the request that made an order never
// makes another one.
func problemOrderEnded(id uuid.UUID, status order.Status) *problem {
	return &problem{
		kind: kindOrderEnded, location: orderPath(id), orderID: id, orderStatus: status,
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
func (s *Server) answerReplay(c echo.Context, r reservation.Request, answer reservation.Answer) error {
	var found []order.Order
	id := answer.Reservation.OrderID
	err := s.inFlight.purchases.admit(func(c echo.Context) error {
		return s.queryPostgres(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			found, err = s.config.AwaitedOrders.FindOrders(ctx, []uuid.UUID{id})
			return err
		})
	})(c)
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
	s.answerAccepted(c, r, answer, err != nil)
	return nil
}
