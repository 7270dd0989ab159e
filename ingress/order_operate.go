package ingress

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/internal/operators"
	"stampede/reservation/order"
)

// This file serves operators' calls on orders.

var (
	problemNoSuchOrder = fixed(problem{
		kind: kindOrderNotFound,
		detail: "No order in Postgres has this id. It may have been reserved a moment ago: " +
			"with ?user= it is also looked up in Redis, which finds orders by their buyer.",
	})
	problemListTooWide = fixed(problem{
		kind: kindInvalid, detail: "A list of orders needs user or sale; status alone would read all orders.",
	})
)

// showAnyOrder serves GET /v1/admin/orders/{order}.
func (s *Server) showAnyOrder(c echo.Context) error {
	if _, err := s.admin.admit(c.Request(), operators.Viewer); err != nil {
		return err
	}
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
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return uuid.Nil, "", invalid("The query of the URL is not valid.")
	}
	for name, values := range query {
		switch {
		case name != "user":
			return uuid.Nil, "", &order.InvalidError{Field: truncate(name), Reason: "is not known; this call takes user"}
		case len(values) > 1:
			return uuid.Nil, "", &order.InvalidError{Field: name, Reason: "must be given once"}
		}
		user = values[0]
		if err := order.ValidateUser(user); err != nil {
			return uuid.Nil, "", err
		}
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return uuid.Nil, "", problemNoSuchOrder
	}
	return id, user, nil
}

// findHistory looks the order up in Postgres, and then, if its user is known, among the reservations in Redis. If both
// miss it, it may have been recorded between the two lookups, as in findOrder.
func (s *Server) findHistory(
	ctx context.Context, id uuid.UUID, user string,
) (o order.Placed, log []order.Logged, err error) {
	inPostgres := func() error {
		return s.queryPostgres(ctx, operatorTimeout, func(ctx context.Context) (err error) {
			o, log, err = s.config.OperatorsOrders.History(ctx, id)
			return err
		})
	}
	if err = inPostgres(); !errors.Is(err, order.ErrNotFound) || user == "" {
		return o, log, err
	}
	reserved, err := s.findReserved(ctx, id, user)
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

// listAnyOrders serves GET /v1/admin/orders.
func (s *Server) listAnyOrders(c echo.Context) error {
	if _, err := s.admin.admit(c.Request(), operators.Viewer); err != nil {
		return err
	}
	var of order.Filter
	p, err := readPage(c, defaultOrders, map[string]func(string) error{
		"user": func(text string) error { of.User = text; return order.ValidateUser(text) },
		"sale": func(text string) error { return parseSaleFilter("sale", text, &of.Sale) },
		"status": func(text string) error {
			if of.Status = order.Status(text); !slices.Contains(order.Recorded(), of.Status) {
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
	err = s.queryPostgres(c.Request().Context(), operatorTimeout, func(ctx context.Context) error {
		orders, next, err := s.config.OperatorsOrders.ListOrders(ctx, of, p.after, p.limit)
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

// cancelAnyOrder serves POST /v1/admin/orders/{order}/cancel.
func (s *Server) cancelAnyOrder(c echo.Context) error {
	name, err := s.admin.admit(c.Request(), operators.Operator)
	if err != nil {
		return err
	}
	id, user, err := anyOrder(c)
	if err != nil {
		return err
	}
	var body struct {
		Reason string `json:"reason"`
	}
	if err := readObject(c.Request(), &body); err != nil {
		return err
	}
	if err := order.ValidateReason(body.Reason); err != nil {
		return err
	}
	var cancelled order.Placed
	withdraw := func(ctx context.Context) (_ order.Order, err error) {
		cancelled, err = s.config.OperatorsOrders.Withdraw(ctx, id, body.Reason, name)
		return cancelled.Order, err
	}
	if ctx := c.Request().Context(); user == "" {
		_, err = s.changeInPostgres(ctx, withdraw)
	} else {
		_, err = s.changeOrder(ctx, id, user, withdraw)
	}
	if errors.Is(err, order.ErrNotFound) {
		return problemNoSuchOrder
	} else if err != nil {
		return err
	}
	cancelled.Order = s.versions.latest(cancelled.Order) // from now on its buyer sees it
	return writeJSON(c, http.StatusOK, cancelled.View())
}
