package ingress

import (
	"context"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

// defaultOrders is the length of a page if the request has no limit.
const defaultOrders = 20

// orderService serves what buyers do with their orders.
type orderService struct{ *core }

// show serves GET /v1/orders/{order}.
func (s *orderService) show(c echo.Context) error {
	user, id, err := s.identify(c)
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
func (s *orderService) list(c echo.Context) error {
	user, err := s.authenticate(c, s.requestUser)
	if err != nil {
		return err
	}
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
func (s *orderService) pay(c echo.Context) error {
	user, id, err := s.identify(c)
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
func (s *orderService) cancel(c echo.Context) error {
	user, id, err := s.identify(c)
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

// identify authenticates the buyer and reads which order the request is about. It does not check whose
// order it is.
func (s *orderService) identify(c echo.Context) (user string, id uuid.UUID, err error) {
	return s.identifyBy(c, s.requestUser)
}

// identifyBy is identify with another way to authenticate.
func (s *orderService) identifyBy(
	c echo.Context, authenticate func(echo.Context) (string, error),
) (user string, id uuid.UUID, err error) {
	if user, err = s.authenticate(c, authenticate); err != nil {
		return "", uuid.Nil, err
	}
	id, ok := parseID(c.Param("order"))
	if !ok {
		return "", uuid.Nil, problemOrderNotFound
	}
	return user, id, nil
}

// authenticate authenticates a call on orders, within the rate limits of such calls.
func (s *orderService) authenticate(
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
func (s *orderService) requestUser(c echo.Context) (string, error) { return s.auth.user(c.Request()) }

// orderView is an order in JSON, as its buyer sees it.
type orderView struct {
	order.View
	// Receipt is in the answer to the purchase only.
	Receipt     string `json:"receipt,omitempty"`
	MayBeBehind bool   `json:"may_be_behind,omitzero"`
}

func (o foundOrder) view() orderView { return orderView{View: o.View(), MayBeBehind: o.mayBeBehind} }
