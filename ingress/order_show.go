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
)

var (
	errBreakerOpen      = errors.New("postgres did not answer a moment ago")
	errVersionForgotten = errors.New("the order may have been shown in a later version, which is not remembered any more")
)

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
	// MayBeBehind: Postgres could not be asked, and may know more.
	MayBeBehind bool `json:"may_be_behind,omitzero"`
}

// foundOrder is an order as it is to be shown now.
type foundOrder struct {
	reservation.Order
	// behind: Postgres could not be asked, and may know more.
	mayBeBehind bool
}

func (o foundOrder) view() orderView {
	v := viewOf(o.Order)
	v.MayBeBehind = o.mayBeBehind
	return v
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
	user, id, err := s.identifyOrder(c)
	if err != nil {
		return err
	}
	receipt, err := s.verifyReceipt(c, id, user)
	if err != nil {
		return err
	}
	found, err := s.findOrder(c.Request().Context(), id, user, receipt)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, found.view())
}

// buyer finds out who asks for orders, as often as they may.
func (s *Server) authenticateBuyer(r *http.Request) (user string, err error) {
	now := time.Now()
	if err := s.limits.admitAddress(&s.limits.orders, r, now); err != nil {
		return "", err
	}
	if user, err = s.auth.user(r); err != nil {
		return "", err
	}
	return user, s.limits.admitUser(&s.limits.orders, user, now)
}

// asksForOrder finds out who asks, and for which order. Whether it is theirs is not known yet.
func (s *Server) identifyOrder(c echo.Context) (user string, id uuid.UUID, err error) {
	if user, err = s.authenticateBuyer(c.Request()); err != nil {
		return "", uuid.Nil, err
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return "", uuid.Nil, problemOrderNotFound
	}
	return user, id, nil
}

// findOrder looks where the order is further on first: in Postgres, then among the reservations in
// Redis. In neither it may still exist, if it was rejected and its units given back between the two
// looks; then Postgres has it by now.
//
// With its receipt, an order that Redis has lost is voided as soon as Postgres knows of that, and until then undecided.
func (s *Server) findOrder(ctx context.Context, id uuid.UUID, user string, receipt *reservation.Receipt) (found foundOrder, err error) {
	order, err := s.findRecorded(ctx, id, receipt)
	if errors.Is(err, reservation.ErrOrderNotFound) {
		if order, err = s.findReserved(ctx, id, user); errors.Is(err, reservation.ErrOrderNotFound) {
			order, err = s.findRecorded(ctx, id, receipt)
		} else if err != nil {
			return foundOrder{}, err
		}
	}
	behind := false
	if err != nil && !errors.Is(err, reservation.ErrOrderNotFound) {
		order, err = s.findWithoutPostgres(ctx, id, user, err)
		behind = true
	}
	switch {
	case err == nil && order.UserID == user:
		return foundOrder{s.versions.latest(order), behind}, nil
	case err == nil:
		return foundOrder{}, reservation.ErrOrderNotFound
	case receipt != nil && errors.Is(err, reservation.ErrOrderNotFound):
		return foundOrder{}, problemFateUndecided
	}
	return foundOrder{}, err
}

// foundWithoutPostgres is the order as it was shown last, or else as Redis holds it: unless it may have been shown in a
// later version than that. What neither knows may be in Postgres, so it is not known whether it exists.
func (s *Server) findWithoutPostgres(ctx context.Context, id uuid.UUID, user string, cause error) (reservation.Order, error) {
	if order, known := s.versions.recall(id); known {
		return order, nil
	}
	missing := errVersionForgotten
	if !s.versions.mayHaveForgotten(id) {
		var order reservation.Order
		if order, missing = s.findReserved(ctx, id, user); missing == nil {
			return order, nil
		}
	}
	return reservation.Order{}, fmt.Errorf("%w: order %s: postgres: %w; else: %v", reservation.ErrUnavailable, id, cause, missing) //nolint:errorlint // "not found" in Redis alone is no finding
}

// reserved asks Redis.
func (s *Server) findReserved(ctx context.Context, id uuid.UUID, user string) (reservation.Order, error) {
	limited, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	return s.config.Reservations.FindReserved(limited, id, user)
}

// recorded asks Postgres for an order, or for the fate of the one whose receipt is there.
func (s *Server) findRecorded(ctx context.Context, id uuid.UUID, receipt *reservation.Receipt) (order reservation.Order, err error) {
	err = s.queryPostgres(ctx, orderTimeout, func(ctx context.Context) (err error) {
		if receipt != nil {
			order, err = s.config.Orders.FindByReceipt(ctx, *receipt)
		} else {
			order, err = s.config.Orders.Order(ctx, id)
		}
		return err
	})
	return order, err
}

// look asks Postgres, unless that is known not to answer.
func (s *Server) queryPostgres(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	if s.postgres.isOpen.Load() {
		return errBreakerOpen
	}
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	err := ask(limited)
	switch {
	case err == nil, errors.Is(err, reservation.ErrOrderNotFound):
		s.postgres.succeeded()
	case ctx.Err() == nil:
		s.postgres.failed(began)
	}
	return err
}
