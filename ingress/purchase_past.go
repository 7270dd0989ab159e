package ingress

import (
	"context"
	"errors"
	"fmt"
	"time"

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

// unknownAnswer returns the answer to a purchase in a sale that Redis does not have. That is one that does not exist,
// or one that has ended and whose keys were deleted, as with its archive. Others are reported as unavailable: Redis
// has lost them.
func (s *Server) unknownAnswer(c echo.Context, r reservation.Request) (reservation.Answer, error) {
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	current, err := s.saleFeed.get(ctx, r.Sale)
	switch {
	case errors.Is(err, reservation.ErrSaleNotFound):
		return reservation.Answer{Verdict: reservation.UnknownSale}, nil
	case err != nil:
		return reservation.Answer{}, fmt.Errorf("%w: look up sale %s: %w", problemPastUnknown, r.Sale, err)
	case current.sales[0].Sale.StateAt(time.Now()) != reservation.StateEnded:
		return reservation.Answer{}, problemUnavailable
	}
	return s.pastAnswer(c, r)
}
