package ingress

import (
	"time"

	"github.com/go-json-experiment/json"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// streamSale serves GET /v1/sales/{sale}/events: the sale as it is, and every change.
func (s *Server) streamSale(c echo.Context) error {
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	if err := s.checkSaleTicket(c, sale); err != nil {
		return err
	}
	release, err := s.acquireSaleStream(c.Request())
	if err != nil {
		return err
	}
	defer release()
	sub, err := s.saleFeed.subscribe(sale)
	if err != nil {
		return err
	}
	defer s.saleFeed.unsubscribe(sale, sub)
	left := c.Request().Context().Done()
	timeout := time.NewTimer(catalogTimeout)
	defer timeout.Stop()
	var update saleUpdate
	select {
	case update = <-sub.updates:
	case <-timeout.C:
		return problemUnavailable
	case <-s.waitsEnd:
		return problemOverloaded
	case <-left:
		return nil
	}
	if update.err != nil {
		return update.err
	}
	stream := openStream(c)
	defer stream.close()
	for err := stream.send("sale", 0, update.data); err == nil; {
		select {
		case update = <-sub.updates:
			if err = update.err; err == nil {
				err = stream.send("sale", 0, update.data)
			}
		case <-stream.heartbeats.C:
			err = stream.sendHeartbeat()
		case <-s.waitsEnd:
			return nil
		case <-left:
			return nil
		}
	}
	return nil // the client has left, or the sale is gone
}

// saleUpdate is the JSON of a saleView, or an error.
type saleUpdate struct {
	data []byte
	err  error
}

// saleView is a sale in the data of an event.
type saleView struct {
	State     reservation.State `json:"state"`
	Stock     int64             `json:"stock"`
	Available int64             `json:"available"`
	Held      int64             `json:"held"`
	Sold      int64             `json:"sold"`
}

func updateOf(result *snapshot) saleUpdate {
	if result.err != nil {
		return saleUpdate{err: result.err}
	}
	now := result.sales[0]
	if now.Err != nil {
		return saleUpdate{err: now.Err}
	}
	data, err := json.Marshal(saleView{
		State: now.State, Stock: now.Stock, Available: now.Available, Held: now.Held, Sold: now.Sold,
	})
	return saleUpdate{data: data, err: err}
}
