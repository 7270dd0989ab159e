package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// changeTimeout bounds one try to change an order. It is longer than a look may take, because a change
// waits for the others of the same order and for those of the same sale.
const changeTimeout = 3 * time.Second

// payOrder serves POST /v1/orders/{order}/pay.
func (s *Server) payOrder(c echo.Context) error {
	user, id, err := s.identifyOrder(c)
	if err != nil {
		return err
	}
	var body struct {
		Reference string `json:"reference"`
	}
	if err := readObject(c.Request(), &body); err != nil {
		return err
	}
	if err := reservation.ValidateReference(body.Reference); err != nil {
		return err
	}
	return s.answerChange(c, id, user, func(ctx context.Context) (reservation.Order, error) {
		return s.config.Orders.Pay(ctx, id, user, body.Reference)
	})
}

// cancelOrder serves POST /v1/orders/{order}/cancel.
func (s *Server) cancelOrder(c echo.Context) error {
	user, id, err := s.identifyOrder(c)
	if err != nil {
		return err
	}
	if err := readEmptyObject(c.Request()); err != nil {
		return err
	}
	return s.answerChange(c, id, user, func(ctx context.Context) (reservation.Order, error) {
		return s.config.Orders.Cancel(ctx, id, user)
	})
}

// answerChange answers with the order after act. It takes its places only now that the body has been
// read, so that clients who send theirs slowly cannot take all of them.
func (s *Server) answerChange(c echo.Context, id uuid.UUID, user string, act func(context.Context) (reservation.Order, error)) error {
	return s.inFlight.orders.admit(func(c echo.Context) error {
		order, err := s.changeOrder(c.Request().Context(), id, user, act)
		if err != nil {
			return err
		}
		return writeJSON(c, http.StatusOK, viewOf(s.versions.latest(order)))
	})(c)
}

// changeOrder changes an order that Postgres has. One that Postgres has not and Redis has cannot be
// changed yet. One that neither has may be on its way between the two looks, as in findOrder.
func (s *Server) changeOrder(
	ctx context.Context, id uuid.UUID, user string, act func(context.Context) (reservation.Order, error),
) (reservation.Order, error) {
	order, err := s.changeInPostgres(ctx, act)
	if !errors.Is(err, reservation.ErrOrderNotFound) {
		return order, err
	}
	switch _, err := s.findReserved(ctx, id, user); {
	case err == nil:
		return reservation.Order{}, fmt.Errorf("order %s: %w", id, reservation.ErrOrderNotConfirmed)
	case errors.Is(err, reservation.ErrOrderNotFound):
		return s.changeInPostgres(ctx, act)
	default:
		return reservation.Order{}, err
	}
}

// change lets Postgres decide, unless that is known not to answer.
func (s *Server) changeInPostgres(ctx context.Context, act func(context.Context) (reservation.Order, error)) (reservation.Order, error) {
	if s.postgres.isOpen.Load() {
		return reservation.Order{}, fmt.Errorf("%w: %w", problemNotChanged, errBreakerOpen)
	}
	limited, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	began := time.Now()
	order, err := act(limited)
	if !isDecision(err) {
		if ctx.Err() == nil {
			s.postgres.failed(began)
		}
		if errors.Is(err, reservation.ErrChangeUnknown) {
			return reservation.Order{}, fmt.Errorf("%w: %w", problemChangeUnknown, err)
		}
		return reservation.Order{}, fmt.Errorf("%w: %w", problemNotChanged, err)
	}
	s.postgres.succeeded()
	return order, err
}

// isDecision tells what Postgres decided about an order from what kept it from deciding.
func isDecision(err error) bool {
	return err == nil || errors.Is(err, reservation.ErrOrderNotFound) ||
		errors.Is(err, reservation.ErrIllegalTransition) || errors.Is(err, reservation.ErrOrderExpired) ||
		errors.Is(err, reservation.ErrOrderDamaged)
}
