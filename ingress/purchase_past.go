package ingress

import (
	"context"
	"errors"
	"fmt"

	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// problemPastUnknown is for a purchase in a sale of which only Postgres knows the buyers, while it does not answer.
var problemPastUnknown = fixed(problem{
	kind: kindUnavailable, retryAfter: retrySoon,
	detail: "Nothing was reserved: the sale has ended. Whether this purchase was made before cannot be looked up now. " +
		"Retry after a moment.",
})

// pastAnswer returns the answer to a purchase in a sale that has ended and that Redis has retired, as Redis would have
// given it before. Only requests that come long after the end need it. They take a slot and a connection of purchases.
func (s *Server) pastAnswer(c echo.Context, r reservation.Request) (answer reservation.Answer, err error) {
	err = s.inFlight.purchases.admit(func(c echo.Context) error {
		return s.queryPostgres(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			answer, err = s.config.AwaitedOrders.PastAnswer(ctx, r)
			return err
		})
	})(c)
	if err != nil {
		return reservation.Answer{}, fmt.Errorf("%w: sale %s: postgres: %w", problemPastUnknown, r.Sale, err)
	}
	return answer, nil
}

// orPastAnswer returns the answer of Redis, or that of Postgres if Redis has no buyers of the sale any more. Redis may
// not have the sale at all: then its orders are archived, or its keys were deleted.
func (s *Server) orPastAnswer(
	c echo.Context, r reservation.Request, answer reservation.Answer, err error,
) (reservation.Answer, error) {
	isLost := errors.Is(err, reservation.ErrLostSale)
	switch {
	case err != nil && !isLost:
		return answer, err
	case answer.Verdict == reservation.Retired:
		return s.pastAnswer(c, r)
	case answer.Verdict != reservation.UnknownSale && !isLost:
		return answer, nil
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	switch current, feedErr := s.saleFeed.get(ctx, r.Sale); {
	case feedErr == nil && current.sales[0].Retired:
		return s.pastAnswer(c, r)
	case isLost || errors.Is(feedErr, reservation.ErrSaleNotFound):
		return answer, err
	default: // it exists, or that is unknown
		return answer, problemUnavailable
	}
}
