package ingress

import (
	"context"
	"net/http"

	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

// defaultOrders is the length of a page if the request has no limit.
const defaultOrders = 20

// listOrders serves GET /v1/orders: the buyer's orders that are in Postgres, newest first.
func (s *Server) listOrders(c echo.Context) error {
	user, err := s.authenticateBuyer(c, s.requestUser)
	if err != nil {
		return err
	}
	p, err := readPage(c, defaultOrders)
	if err != nil {
		return err
	}
	var orders []order.Order
	err = s.queryPostgres(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
		// One more order tells whether there is a next page.
		orders, err = s.config.Orders.OrdersOf(ctx, user, p.after, p.limit+1)
		return err
	})
	if err != nil {
		return err
	}
	var answer struct {
		Orders     []orderView `json:"orders"`
		NextCursor string      `json:"next_cursor,omitempty"`
	}
	if len(orders) > p.limit {
		orders = orders[:p.limit]
		answer.NextCursor = cursorAfter(orders[p.limit-1].ID)
	}
	answer.Orders = make([]orderView, len(orders))
	for i, o := range orders {
		answer.Orders[i] = viewOf(s.versions.latest(o))
	}
	return writeJSON(c, http.StatusOK, answer)
}
