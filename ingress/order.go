package ingress

import (
	"context"
	"errors"
	"net/http"
	"slices"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/ledger/problems"
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
	err = s.inFlight.orders.withSlot(func() error {
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
	return s.inFlight.orders.withSlot(func() error {
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

// stream serves GET /v1/orders/{order}/events: the order as it is, and every change until the last. An event
// is named after the status and its id is the order's version. Changes in quick succession may arrive as one
// event. While Postgres does not answer, another server may have shown the client a later version than can be
// found here: the stream is then silent until there is a later one.
func (s *orderService) stream(c echo.Context, user string) error {
	id, err := orderInPath(c)
	if err != nil {
		return err
	}
	receipt, err := s.receipts.verify(c, id, user)
	if err != nil {
		return err
	}
	release, err := s.limits.openStream(&s.limits.orderStreams, c.Request(), user)
	if err != nil {
		return err
	}
	defer release()
	// Waiting begins before the lookup, so that no change between the two is missed.
	w := s.waiters.add(id, 0, false)
	defer s.waiters.remove(w)
	o, err := s.findInSlot(c, id, user, receipt)
	if err != nil {
		return err
	}
	s.waiters.setSeen(w, o.Version)
	seen := lastEventID(c.Request().Header)
	switch {
	case seen > o.Version && (!o.mayBeBehind || seen > order.LastVersion()):
		seen = 0 // no event has this id
	case seen >= o.Version && o.Ended():
		// After this answer, and no other, browsers stop reconnecting.
		c.Response().Header()["Cache-Control"] = noStore
		return c.NoContent(http.StatusNoContent)
	}

	stream := openStream(c)
	defer stream.close()
	for {
		if o.Version > seen {
			if sendOrder(stream, o) != nil {
				return nil
			}
			seen = o.Version
		}
		if o.Ended() {
			return nil
		}
		select {
		case next := <-w.updates:
			if next.Version > o.Version {
				o = foundOrder{Order: s.orders.versions.latest(next)}
			}
		case <-stream.heartbeats.C:
			if stream.sendHeartbeat() != nil {
				return nil
			}
			if o.Status != order.StatusReserved {
				continue
			}
			// If Redis has lost the order, no worker will ever announce it.
			if o, err = s.recheckReserved(c, id, user, receipt, o); err != nil {
				return nil //nolint:nilerr // the stream ends, and the client gets the problem when it reconnects
			}
		case <-s.waitsEnd:
			return nil
		case <-c.Request().Context().Done():
			return nil
		}
	}
}

// findInSlot is orderStore.find in a slot of buyers' calls.
func (s *orderService) findInSlot(
	c echo.Context, id uuid.UUID, user string, receipt *order.Receipt,
) (found foundOrder, err error) {
	err = s.inFlight.orders.withSlot(func() (err error) {
		found, err = s.orders.find(c.Request().Context(), id, user, receipt)
		return err
	})
	return found, err
}

// recheckReserved looks a reserved order up again. Its only error is order.ErrNotFound; after any other
// the order stays as it was.
func (s *orderService) recheckReserved(
	c echo.Context, id uuid.UUID, user string, receipt *order.Receipt, reserved foundOrder,
) (foundOrder, error) {
	o, err := s.findInSlot(c, id, user, receipt)
	switch {
	case err == nil:
		return o, nil
	case errors.Is(err, order.ErrNotFound):
		return foundOrder{}, err
	}
	return reserved, nil
}

func sendOrder(stream *eventStream, found foundOrder) error {
	data, err := json.Marshal(found.view())
	if err != nil {
		return err
	}
	return stream.send(string(found.Status), found.Version, data)
}
