package ingress

import (
	"context"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

// defaultOrders is the length of a page if the request has no limit.
const defaultOrders = 20

// listOrders serves GET /v1/orders: the buyer's orders that are in Postgres, of one sale or of all, newest first.
func (s *Server) listOrders(c echo.Context) error {
	user, err := s.authenticateBuyer(c, s.requestUser)
	if err != nil {
		return err
	}
	of := order.Filter{User: user}
	p, err := readPage(c, defaultOrders, map[string]func(string) error{
		"sale_id": func(text string) error { return parseSaleFilter("sale_id", text, &of.Sale) },
	})
	if err != nil {
		return err
	}
	var orders []order.Placed
	var next uuid.UUID
	err = s.queryPostgres(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
		orders, next, err = s.config.Orders.ListOrders(ctx, of, p.after, p.limit)
		return err
	})
	if err != nil {
		return err
	}
	var answer struct {
		Orders     []order.View `json:"orders"`
		NextCursor string       `json:"next_cursor,omitempty"`
	}
	if next != uuid.Nil {
		answer.NextCursor = cursorAfter(next)
	}
	answer.Orders = make([]order.View, len(orders))
	for i, o := range orders {
		answer.Orders[i] = s.versions.latest(o.Order).View()
	}
	return writeJSON(c, http.StatusOK, answer)
}
