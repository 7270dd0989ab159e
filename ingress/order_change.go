package ingress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/pg"
	"stampede/reservation/order"
)

// changeTimeout bounds one attempt to change an order. It is longer than orderTimeout, because a change waits
// for other changes of the same order and of the same sale.
const changeTimeout = 3 * time.Second

var (
	problemNotChanged = fixed(problem{
		kind: kindUnavailable, retryAfter: retrySoon,
		detail: "Nothing was done: a server that the request needs does not answer. Retry after a moment.",
	})
	problemChangeUnknown = fixed(problem{
		kind: kindOutcomeUnknown, retryAfter: retrySoon,
		detail: "The outcome is unknown: no answer came back in time, and the change may have been made. " +
			"Repeat the request to find out: it changes nothing twice.",
	})
)

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
	if err := order.ValidateReference(body.Reference); err != nil {
		return err
	}
	return s.answerChange(c, id, user, func(ctx context.Context) (order.Order, error) {
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
	return s.answerChange(c, id, user, func(ctx context.Context) (order.Order, error) {
		return s.config.Orders.Cancel(ctx, id, user)
	})
}

// answerChange answers with the changed order. It takes a slot after the body was read, so that clients who
// send slowly hold none.
func (s *Server) answerChange(
	c echo.Context, id uuid.UUID, user string, change func(context.Context) (order.Order, error),
) error {
	return s.inFlight.orders.admit(func(c echo.Context) error {
		changed, err := s.changeOrder(c.Request().Context(), id, user, change)
		if err != nil {
			return err
		}
		return writeJSON(c, http.StatusOK, s.versions.latest(changed).View())
	})(c)
}

// changeOrder changes an order in Postgres. An order that only Redis has cannot be changed yet. One that
// neither has may have been rejected and released between the two lookups, as in findOrder.
func (s *Server) changeOrder(
	ctx context.Context, id uuid.UUID, user string, change func(context.Context) (order.Order, error),
) (order.Order, error) {
	o, err := s.changeInPostgres(ctx, change)
	if !errors.Is(err, order.ErrNotFound) {
		return o, err
	}
	switch _, err := s.findReserved(ctx, id, user); {
	case err == nil:
		return order.Order{}, fmt.Errorf("order %s: %w", id, order.ErrNotConfirmed)
	case errors.Is(err, order.ErrNotFound):
		return s.changeInPostgres(ctx, change)
	default:
		return order.Order{}, err
	}
}

// changeInPostgres makes the change, unless Postgres is known not to answer.
func (s *Server) changeInPostgres(
	ctx context.Context, change func(context.Context) (order.Order, error),
) (order.Order, error) {
	if s.postgres.isOpen.Load() {
		return order.Order{}, fmt.Errorf("%w: %w", problemNotChanged, errBreakerOpen)
	}
	limited, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	began := time.Now()
	o, err := change(limited)
	if !isDecision(err) {
		if ctx.Err() == nil {
			s.postgres.failed(began)
		}
		if errors.Is(err, pg.ErrChangeUnknown) {
			return order.Order{}, fmt.Errorf("%w: %w", problemChangeUnknown, err)
		}
		return order.Order{}, fmt.Errorf("%w: %w", problemNotChanged, err)
	}
	s.postgres.succeeded()
	return o, err
}

// isDecision reports whether Postgres has decided about the change, as opposed to an error that kept it from
// deciding.
func isDecision(err error) bool {
	return err == nil || errors.Is(err, order.ErrNotFound) ||
		errors.Is(err, order.ErrIllegalTransition) || errors.Is(err, order.ErrExpired) ||
		errors.Is(err, order.ErrDamaged) || errors.Is(err, order.ErrArchived)
}
