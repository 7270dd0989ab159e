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
	"stampede/reservation/order"
)

const (
	// orderTimeout bounds one query of Postgres, including the wait for a connection.
	orderTimeout = time.Second
	// operatorTimeout bounds an operator's query: a page with a status may look at many orders.
	operatorTimeout = 3 * time.Second
	// reservedTimeout bounds one query of Redis.
	reservedTimeout = time.Second
)

var errVersionForgotten = errors.New("the order may have been shown in a later version, which is forgotten")

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

// identifyOrder authenticates the buyer and reads which order the request is about. It does not check whose
// order it is.
func (s *Server) identifyOrder(c echo.Context) (user string, id uuid.UUID, err error) {
	return s.identifyOrderBy(c, s.requestUser)
}

// identifyOrderBy is identifyOrder with another way to authenticate.
func (s *Server) identifyOrderBy(
	c echo.Context, authenticate func(echo.Context) (string, error),
) (user string, id uuid.UUID, err error) {
	if user, err = s.authenticateBuyer(c, authenticate); err != nil {
		return "", uuid.Nil, err
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return "", uuid.Nil, problemOrderNotFound
	}
	return user, id, nil
}

// authenticateBuyer authenticates a call on orders, within the rate limits of such calls.
func (s *Server) authenticateBuyer(
	c echo.Context, authenticate func(echo.Context) (string, error),
) (user string, err error) {
	now := time.Now()
	if err := s.limits.admitAddress(&s.limits.orders, c.Request(), now); err != nil {
		return "", err
	}
	if user, err = authenticate(c); err != nil {
		return "", err
	}
	return user, s.limits.admitUser(&s.limits.orders, user, now)
}

// requestUser authenticates by the headers of a request, as for every call but a stream.
func (s *Server) requestUser(c echo.Context) (string, error) { return s.auth.user(c.Request()) }

// foundOrder is an order as it is shown.
type foundOrder struct {
	order.Order
	// mayBeBehind: Postgres did not answer, and may have a later version.
	mayBeBehind bool
}

// findOrder looks in Postgres first, where the order is in its latest version, and then among the
// reservations in Redis. If both miss it, it may have been rejected and released between the two lookups, and
// is in Postgres now.
//
// With its receipt, an order that Redis has lost is voided once Postgres knows that, and undecided until then.
func (s *Server) findOrder(
	ctx context.Context, id uuid.UUID, user string, receipt *order.Receipt,
) (found foundOrder, err error) {
	o, err := s.findRecorded(ctx, id, receipt)
	if errors.Is(err, order.ErrNotFound) {
		if o, err = s.findReserved(ctx, id, user); errors.Is(err, order.ErrNotFound) {
			o, err = s.findRecorded(ctx, id, receipt)
		} else if err != nil {
			return foundOrder{}, err
		}
	}
	mayBeBehind := false
	if err != nil && !errors.Is(err, order.ErrNotFound) && !errors.Is(err, order.ErrArchived) {
		o, err = s.findWithoutPostgres(ctx, id, user, err)
		mayBeBehind = true
	}
	switch {
	case err == nil && o.UserID == user:
		return foundOrder{s.versions.latest(o), mayBeBehind}, nil
	case err == nil:
		return foundOrder{}, order.ErrNotFound
	case receipt != nil && errors.Is(err, order.ErrNotFound):
		return foundOrder{}, problemOrderUndecided
	}
	return foundOrder{}, err
}

// findRecorded looks the order up in Postgres, or the one whose receipt is given.
func (s *Server) findRecorded(
	ctx context.Context, id uuid.UUID, receipt *order.Receipt,
) (o order.Order, err error) {
	err = s.queryPostgres(ctx, orderTimeout, func(ctx context.Context) (err error) {
		if receipt != nil {
			o, err = s.config.Orders.FindByReceipt(ctx, *receipt)
		} else {
			o, err = s.config.Orders.Order(ctx, id)
		}
		return err
	})
	return o, err
}

// findReserved looks the order up in Redis.
func (s *Server) findReserved(ctx context.Context, id uuid.UUID, user string) (order.Order, error) {
	limited, cancel := context.WithTimeout(ctx, reservedTimeout)
	defer cancel()
	return s.config.Reservations.FindReserved(limited, id, user)
}

// findWithoutPostgres returns the order as it was shown last, or as Redis holds it, unless it may have been
// shown in a later version that is forgotten. An order that is in neither place may be in Postgres: the
// error says that it is unavailable, not that it does not exist.
func (s *Server) findWithoutPostgres(
	ctx context.Context, id uuid.UUID, user string, cause error,
) (order.Order, error) {
	if o, known := s.versions.recall(id); known {
		return o, nil
	}
	missing := errVersionForgotten
	if !s.versions.mayHaveForgotten(id) {
		var o order.Order
		if o, missing = s.findReserved(ctx, id, user); missing == nil {
			return o, nil
		}
	}
	//nolint:errorlint // "not found" in Redis alone does not mean that the order does not exist
	err := fmt.Errorf("%w: order %s: postgres: %w; else: %v", reservation.ErrUnavailable, id, cause, missing)
	return order.Order{}, err
}

// orderView is an order in JSON, as its buyer sees it.
type orderView struct {
	order.View
	// Receipt is in the answer to the purchase only.
	Receipt     string `json:"receipt,omitempty"`
	MayBeBehind bool   `json:"may_be_behind,omitzero"`
}

func (o foundOrder) view() orderView { return orderView{View: o.View(), MayBeBehind: o.mayBeBehind} }
