package ingress

import (
	"errors"
	"net/http"
	"strconv"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// streamOrder serves GET /v1/orders/{order}/events: the order as it is, and then every change of it until the last one.
// An event is named after the status, and its id is the order's version. Changes that follow at once upon each
// other may come as one. While Postgres is away a client may have seen more of the order, at another server, than can be
// found now: it is told nothing then until there is something later.
func (s *Server) streamOrder(c echo.Context) error {
	user, id, err := s.identifyOrder(c)
	if err != nil {
		return err
	}
	receipt, err := s.verifyReceipt(c, id, user)
	if err != nil {
		return err
	}
	leave, err := s.enterOrderStream(c.Request(), user)
	if err != nil {
		return err
	}
	defer leave()
	// To wait before the look leaves no gap in which a change could be missed.
	w := s.waiters.add(id, 0, false)
	defer s.waiters.remove(w)
	order, err := s.findOrderInSlot(c, id, user, receipt)
	if err != nil {
		return err
	}
	s.waiters.setSeen(w, order.Version)
	seen := lastEventID(c.Request().Header)
	switch {
	case seen > reservation.LastVersion():
		seen = 0 // this is no id of ours
	case seen >= order.Version && order.Ended():
		// The only answer after which a browser does not come again.
		c.Response().Header()["Cache-Control"] = noStore
		return c.NoContent(http.StatusNoContent)
	}

	stream := openStream(c)
	defer stream.close()
	for {
		if order.Version > seen {
			if sendOrder(stream, order) != nil {
				return nil
			}
			seen = order.Version
		}
		if order.Ended() {
			return nil
		}
		select {
		case next := <-w.updates:
			if next.Version > order.Version {
				order = foundOrder{Order: s.versions.latest(next)}
			}
		case <-stream.heartbeats.C:
			if stream.sendHeartbeat() != nil {
				return nil
			}
			if order.Status != reservation.StatusReserved {
				continue
			}
			// If Redis has lost it, nobody will ever tell anything of it.
			if order, err = s.recheckReserved(c, id, user, receipt, order); err != nil {
				return nil //nolint:nilerr // the stream ends, and its client hears why when it asks again
			}
		case <-s.waitsEnd:
			return nil
		case <-c.Request().Context().Done():
			return nil
		}
	}
}

// findWithRoom is findOrder with the places that it takes.
func (s *Server) findOrderInSlot(c echo.Context, id uuid.UUID, user string, receipt *reservation.Receipt) (order foundOrder, err error) {
	err = s.inFlight.orders.admit(func(c echo.Context) (err error) {
		order, err = s.findOrder(c.Request().Context(), id, user, receipt)
		return err
	})(c)
	return order, err
}

// lookAgain finds an order that is as yet reserved. Its error is reservation.ErrOrderNotFound; what cannot be found out now
// leaves the order as it was.
func (s *Server) recheckReserved(
	c echo.Context, id uuid.UUID, user string, receipt *reservation.Receipt, reserved foundOrder,
) (foundOrder, error) {
	order, err := s.findOrderInSlot(c, id, user, receipt)
	switch {
	case err == nil:
		return order, nil
	case errors.Is(err, reservation.ErrOrderNotFound):
		return foundOrder{}, err
	}
	return reserved, nil
}

func sendOrder(stream *eventStream, order foundOrder) error {
	data, err := json.Marshal(order.view())
	if err != nil {
		return err
	}
	return stream.send(string(order.Status), order.Version, data)
}

// lastEventID is the version that a client has who comes again; 0 if it does not say.
func lastEventID(h http.Header) int {
	version, err := strconv.Atoi(h.Get("Last-Event-Id"))
	if err != nil || version < 0 {
		return 0
	}
	return version
}
