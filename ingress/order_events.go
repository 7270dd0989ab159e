package ingress

import (
	"errors"
	"net/http"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation/order"
)

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
	err = s.inFlight.orders.hold(func() (err error) {
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
