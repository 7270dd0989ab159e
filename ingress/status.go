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

const (
	// orderTimeout bounds one look into Postgres, the wait for a connection included.
	orderTimeout = time.Second
	// reservedTimeout bounds one look into Redis.
	reservedTimeout = time.Second
	// postgresProbeEvery is how often a Postgres that does not answer is asked all the same. It is
	// twice as long as such a look may take, so that one request at a time waits, and not every buyer
	// who watches an order.
	postgresProbeEvery = 2 * orderTimeout
)

var errPostgresPaused = errors.New("postgres did not answer a moment ago")

// orderView is an order as buyers are shown it.
type orderView struct {
	OrderID    uuid.UUID          `json:"order_id"`
	SaleID     uuid.UUID          `json:"sale_id"`
	UserID     string             `json:"user_id"`
	Quantity   int64              `json:"quantity"`
	Status     reservation.Status `json:"status"`
	Version    int                `json:"version"`
	ReservedAt string             `json:"reserved_at"`
	// ExpiresAt is when it is too late to pay. It is there while there is something to pay.
	ExpiresAt        string `json:"expires_at,omitempty"`
	PaymentReference string `json:"payment_reference,omitempty"`
	Reason           string `json:"reason,omitempty"`
	// Receipt is there in the answer to the purchase.
	Receipt string `json:"receipt,omitempty"`
}

func viewOf(o reservation.Order) orderView {
	v := orderView{
		OrderID: o.ID, SaleID: o.SaleID, UserID: o.UserID, Quantity: o.Quantity, Status: o.Status, Version: o.Version,
		ReservedAt: string(appendTime(nil, o.ReservedAt)), PaymentReference: o.PaymentReference, Reason: o.Reason,
	}
	if o.Status == reservation.StatusConfirmed && !o.ExpiresAt.IsZero() {
		v.ExpiresAt = string(appendTime(nil, o.ExpiresAt))
	}
	return v
}

// showOrder serves GET /v1/orders/{order}.
func (s *Server) showOrder(c echo.Context) error {
	user, id, err := s.asksForOrder(c)
	if err != nil {
		return err
	}
	receipt, err := s.receiptFor(c, id, user)
	if err != nil {
		return err
	}
	order, err := s.findOrder(c.Request().Context(), id, user, receipt)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, viewOf(order))
}

// asksForOrder finds out who asks, and for which order. Whether it is theirs is not known yet.
func (s *Server) asksForOrder(c echo.Context) (user string, id uuid.UUID, err error) {
	if user, err = s.auth.user(c.Request()); err != nil {
		return "", uuid.Nil, err
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return "", uuid.Nil, problemOrder
	}
	return user, id, nil
}

// findOrder looks where the order is further on first: in Postgres, then among the reservations in
// Redis. In neither it may still exist, if it was rejected and its units given back between the two
// looks; then Postgres has it by now. While Postgres is away, what Redis holds is the answer, and
// what Redis does not hold is not known.
//
// With its receipt, an order that Redis has lost is voided as soon as Postgres knows of that, and until then undecided.
func (s *Server) findOrder(ctx context.Context, id uuid.UUID, user string, receipt *reservation.Receipt) (reservation.Order, error) {
	order, err := s.recorded(ctx, id, receipt)
	switch {
	case err == nil:
	case errors.Is(err, reservation.ErrOrderNotFound):
		order, err = s.reserved(ctx, id, user)
		if errors.Is(err, reservation.ErrOrderNotFound) {
			order, err = s.recorded(ctx, id, receipt)
		}
	default:
		var missing error
		if order, missing = s.reserved(ctx, id, user); missing != nil {
			return reservation.Order{}, fmt.Errorf("%w: order %s: postgres: %w; redis: %v", reservation.ErrUnavailable, id, err, missing) //nolint:errorlint // "not found" in Redis alone is no finding
		}
		err = nil
	}
	if err != nil {
		if receipt != nil && errors.Is(err, reservation.ErrOrderNotFound) {
			return reservation.Order{}, problemUndecided
		}
		return reservation.Order{}, err
	}
	if order.UserID != user {
		return reservation.Order{}, reservation.ErrOrderNotFound
	}
	return order, nil
}

// reserved asks Redis.
func (s *Server) reserved(ctx context.Context, id uuid.UUID, user string) (reservation.Order, error) {
	limited, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	return s.config.Reservations.FindReserved(limited, id, user)
}

// recorded asks Postgres for an order, or for the fate of the one whose receipt is there.
func (s *Server) recorded(ctx context.Context, id uuid.UUID, receipt *reservation.Receipt) (order reservation.Order, err error) {
	err = s.look(ctx, func(ctx context.Context) (err error) {
		if receipt != nil {
			order, err = s.config.Orders.Fate(ctx, *receipt)
		} else {
			order, err = s.config.Orders.Order(ctx, id)
		}
		return err
	})
	return order, err
}

// look asks Postgres, unless it did not answer a moment ago.
func (s *Server) look(ctx context.Context, ask func(context.Context) error) error {
	if !s.postgres.admits(postgresProbeEvery) {
		return errPostgresPaused
	}
	limited, cancel := context.WithTimeout(ctx, orderTimeout)
	defer cancel()
	err := ask(limited)
	switch {
	case err == nil, errors.Is(err, reservation.ErrOrderNotFound):
		s.postgres.answered()
	case ctx.Err() == nil:
		s.postgres.failed(postgresProbeEvery)
	}
	return err
}

// lookAside is look for those whose failure says nothing about the looks of everybody else: a question about a
// thousand orders may take too long where one about a single order does not. It takes no probe from them either.
func (s *Server) lookAside(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	if !s.postgres.admitsAside(&s.asideProbe, postgresProbeEvery) {
		return errPostgresPaused
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := ask(limited)
	if err == nil || errors.Is(err, reservation.ErrOrderNotFound) {
		s.postgres.answered()
	}
	return err
}
