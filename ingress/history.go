package ingress

import (
	"context"
	"encoding/base64"
	"net/http"
	"strconv"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// defaultOrders is how many orders a page has where the buyer does not say.
const defaultOrders = 20

// listOrders serves GET /v1/orders: the buyer's own orders that are in Postgres, newest first.
func (s *Server) listOrders(c echo.Context) error {
	user, err := s.auth.user(c.Request())
	if err != nil {
		return err
	}
	limit, err := pageLimit(c, defaultOrders)
	if err != nil {
		return err
	}
	before, err := parseCursor(c.QueryParam("cursor"))
	if err != nil {
		return err
	}
	var orders []reservation.Order
	err = s.look(c.Request().Context(), func(ctx context.Context) (err error) {
		// One more than asked for tells whether there is a next page.
		orders, err = s.config.Orders.OrdersOf(ctx, user, before, limit+1)
		return err
	})
	if err != nil {
		return err
	}
	var page struct {
		Orders     []orderView `json:"orders"`
		NextCursor string      `json:"next_cursor,omitempty"`
	}
	if len(orders) > limit {
		orders = orders[:limit]
		page.NextCursor = cursorAfter(orders[limit-1].ID)
	}
	page.Orders = make([]orderView, len(orders))
	for i, order := range orders {
		page.Orders[i] = viewOf(order)
	}
	return writeJSON(c, http.StatusOK, page)
}

// pageLimit reads how many items a page may have.
func pageLimit(c echo.Context, otherwise int) (int, error) {
	text := c.QueryParam("limit")
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > longestPage {
		return 0, &reservation.InvalidError{Field: "limit", Reason: "must be a whole number from 1 to " + strconv.Itoa(longestPage)}
	}
	return n, nil
}

// cursorAfter is where the page goes on that ends with this order. Clients are not to see an id in it.
func cursorAfter(last uuid.UUID) string { return base64.RawURLEncoding.EncodeToString(last[:]) }

// parseCursor reads what cursorAfter wrote; no cursor is the zero id, at which the first page begins.
func parseCursor(text string) (uuid.UUID, error) {
	if text == "" {
		return uuid.Nil, nil
	}
	var last uuid.UUID
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err == nil && len(raw) == len(last) {
		last = uuid.UUID(raw)
	}
	// Compared with what we would have written: the decoder passes over line ends and stray bits.
	if last == uuid.Nil || cursorAfter(last) != text {
		return uuid.Nil, &reservation.InvalidError{Field: "cursor", Reason: `must be the "next_cursor" of a page before`}
	}
	return last, nil
}
