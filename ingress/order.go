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

// orderService serves what buyers do with their orders.
type orderService struct{ *core }

// show serves GET /v1/orders/{order}.
func (s *orderService) show(c echo.Context, user string) error {
	id, err := orderInPath(c)
	if err != nil {
		return err
	}
	receipt, err := s.receipts.verify(c, id, user)
	if err != nil {
		return err
	}
	found, err := s.findInSlot(c, id, user, receipt)
	if err != nil {
		return err
	}
	return writeJSON(c, http.StatusOK, found.view())
}

// list serves GET /v1/orders: the buyer's orders that are in Postgres, of one sale or of all, newest first.
func (s *orderService) list(c echo.Context, user string) error {
	filter := order.Filter{User: user}
	p, err := readPage(c, defaultOrders, map[string]func(string) error{
		"sale_id": func(text string) error { return parseIDFilter("sale_id", "a sale", text, &filter.Sale) },
	})
	if err != nil {
		return err
	}
	var orders []order.Placed
	var next uuid.UUID
	err = s.inFlight.orders.hold(func() error {
		return s.orders.query(c.Request().Context(), orderTimeout, func(ctx context.Context) (err error) {
			orders, next, err = s.config.Orders.ListOrders(ctx, filter, p.after, p.limit)
			return err
		})
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
		answer.Orders[i] = s.orders.versions.latest(o.Order).View()
	}
	return writeJSON(c, http.StatusOK, answer)
}

// pay serves POST /v1/orders/{order}/pay.
func (s *orderService) pay(c echo.Context, user string) error {
	id, err := orderInPath(c)
	if err != nil {
		return err
	}
	var body struct {
		Reference string `json:"reference"`
	}
	if err := readObject(c, &body); err != nil {
		return err
	}
	if err := order.ValidateReference(body.Reference); err != nil {
		return err
	}
	return s.answerChange(c, id, user, func(ctx context.Context) (order.Order, error) {
		return s.config.Orders.Pay(ctx, id, user, body.Reference)
	})
}

// cancel serves POST /v1/orders/{order}/cancel.
func (s *orderService) cancel(c echo.Context, user string) error {
	id, err := orderInPath(c)
	if err != nil {
		return err
	}
	if err := readEmptyObject(c); err != nil {
		return err
	}
	return s.answerChange(c, id, user, func(ctx context.Context) (order.Order, error) {
		return s.config.Orders.Cancel(ctx, id, user)
	})
}

// answerChange answers with the changed order. It takes a slot after the body was read, so that clients who
// send slowly hold none.
func (s *orderService) answerChange(
	c echo.Context, id uuid.UUID, user string, change func(context.Context) (order.Order, error),
) error {
	return s.inFlight.orders.hold(func() error {
		var changed order.Order
		err := s.orders.change(c.Request().Context(), id, user, func(ctx context.Context) (err error) {
			changed, err = change(ctx)
			return err
		})
		if err != nil {
			return err
		}
		return writeJSON(c, http.StatusOK, s.orders.versions.latest(changed).View())
	})
}

// orderInPath returns which order a request is about. It does not check whose order it is.
func orderInPath(c echo.Context) (uuid.UUID, error) {
	id, ok := parseID(c.Param("order"))
	if !ok {
		return uuid.Nil, problemOrderNotFound
	}
	return id, nil
}

// orderView is an order in JSON, as its buyer sees it.
type orderView struct {
	order.View
	// Receipt is in the answer to the purchase only.
	Receipt     string `json:"receipt,omitempty"`
	MayBeBehind bool   `json:"may_be_behind,omitzero"`
}

func (o foundOrder) view() orderView { return orderView{View: o.View(), MayBeBehind: o.mayBeBehind} }
