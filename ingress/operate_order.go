package ingress

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
	"stampede/reservation/problems"
)

var problemNoSuchOrder = fixed(problem{
	Kind: problems.OrderNotFound,
	detail: "No order in Postgres has this id. It may have been reserved a moment ago: " +
		"with ?user= it is also looked up in Redis, which finds orders by their buyer.",
})

// showOrder serves GET /v1/admin/orders/{order}.
func (s *operatorService) showOrder(c echo.Context, _ string) error {
	id, user, err := anyOrder(c)
	if err != nil {
		return err
	}
	o, log, err := s.findHistory(c.Request().Context(), id, user)
	if errors.Is(err, order.ErrNotFound) {
		return problemNoSuchOrder
	} else if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, o.ViewWith(log))
}

// anyOrder reads which order a call is about, and whose it is, if the call says so.
func anyOrder(c echo.Context) (id uuid.UUID, user string, err error) {
	err = readQuery(c, map[string]func(string) error{
		"user": func(text string) error { user = text; return order.ValidateUser(text) },
	})
	if err != nil {
		return uuid.Nil, "", err
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return uuid.Nil, "", problemNoSuchOrder
	}
	return id, user, nil
}

// findHistory looks the order up in Postgres, and then, if its user is known, among the reservations in Redis. If both
// miss it, it may have been recorded between the two lookups, as in orderStore.find.
func (s *operatorService) findHistory(
	ctx context.Context, id uuid.UUID, user string,
) (o order.Placed, log []order.Logged, err error) {
	inPostgres := func() error {
		return s.orders.query(ctx, operatorTimeout, func(ctx context.Context) (err error) {
			o, log, err = s.config.OperatorsOrders.History(ctx, id)
			return err
		})
	}
	if err = inPostgres(); !errors.Is(err, order.ErrNotFound) || user == "" {
		return o, log, err
	}
	reserved, err := s.orders.findReserved(ctx, id, user)
	switch {
	case errors.Is(err, order.ErrNotFound):
		err = inPostgres()
		return o, log, err
	case err != nil:
		return order.Placed{}, nil, err
	}
	return order.Placed{Order: reserved}, []order.Logged{{
		Version: reserved.Version, Type: order.EventReserved, OccurredAt: reserved.ReservedAt, Data: []byte("{}"),
	}}, nil
}

// listOrders serves GET /v1/admin/orders.
func (s *operatorService) listOrders(c echo.Context, _ string) error {
	var filter order.Filter
	p, err := readPage(c, defaultOrders, map[string]func(string) error{
		"user": func(text string) error { filter.User = text; return order.ValidateUser(text) },
		"sale": func(text string) error { return parseIDFilter("sale", "a sale", text, &filter.Sale) },
		"status": func(text string) error {
			if filter.Status = order.Status(text); !slices.Contains(order.Recorded(), filter.Status) {
				return &order.InvalidError{Field: "status", Reason: "must be that of an order in Postgres"}
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	var answer struct {
		Orders     []order.PlacedView `json:"orders"`
		NextCursor string             `json:"next_cursor,omitempty"`
	}
	err = s.orders.query(c.Request().Context(), operatorTimeout, func(ctx context.Context) error {
		orders, next, err := s.config.OperatorsOrders.ListOrders(ctx, filter, p.after, p.limit)
		answer.Orders = make([]order.PlacedView, len(orders))
		for i, o := range orders {
			answer.Orders[i] = o.View()
		}
		if next != uuid.Nil {
			answer.NextCursor = cursorAfter(next)
		}
		return err
	})
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, answer)
}

// cancelOrder serves POST /v1/admin/orders/{order}/cancel.
func (s *operatorService) cancelOrder(c echo.Context, operator string) error {
	id, user, err := anyOrder(c)
	if err != nil {
		return err
	}
	var body struct {
		Reason string `json:"reason"`
	}
	if err := readObject(c, &body); err != nil {
		return err
	}
	if err := order.ValidateReason(body.Reason); err != nil {
		return err
	}
	var cancelled order.Placed
	withdraw := func(ctx context.Context) (err error) {
		cancelled, err = s.config.OperatorsOrders.Withdraw(ctx, id, body.Reason, operator)
		return err
	}
	if ctx := c.Request().Context(); user == "" {
		err = s.orders.changeInPostgres(ctx, withdraw)
	} else {
		err = s.orders.change(ctx, id, user, withdraw)
	}
	if errors.Is(err, order.ErrNotFound) {
		return problemNoSuchOrder
	} else if err != nil {
		return err
	}
	cancelled.Order = s.orders.versions.latest(cancelled.Order) // from now on its buyer sees it
	return writeJSON(c, http.StatusOK, cancelled.View())
}
