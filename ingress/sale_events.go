package ingress

import (
	"bytes"
	"cmp"
	"errors"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

// saleView is what a sale looks like to those who watch it.
type saleView struct {
	State     reservation.State `json:"state"`
	Stock     int64             `json:"stock"`
	Available int64             `json:"available"`
	Held      int64             `json:"held"`
	Sold      int64             `json:"sold"`
}

// streamSale serves GET /v1/sales/{sale}/events: the sale as it is, and again whenever that has changed.
func (s *Server) streamSale(c echo.Context) error {
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	leave, err := s.enterSaleStream(c.Request())
	if err != nil {
		return err
	}
	defer leave()
	v, err := s.saleFeed.subscribe(sale)
	if err != nil {
		return err
	}
	defer s.saleFeed.unsubscribe(sale, v)
	ended := c.Request().Context().Done()
	first := time.NewTimer(catalogTimeout)
	defer first.Stop()
	var news saleUpdate
	select {
	case news = <-v.updates:
	case <-first.C:
		return problemUnavailable
	case <-s.waitsEnd:
		return problemOverloaded
	case <-ended:
		return nil
	}
	if news.err != nil {
		return news.err
	}
	stream := openStream(c)
	defer stream.close()
	for err := stream.send("sale", 0, news.data); err == nil; {
		select {
		case news = <-v.updates:
			if err = news.err; err == nil {
				err = stream.send("sale", 0, news.data)
			}
		case <-stream.heartbeats.C:
			err = stream.sendHeartbeat()
		case <-s.waitsEnd:
			return nil
		case <-ended:
			return nil
		}
	}
	return nil // the client is gone, or the sale is
}

type subscriber struct {
	// news takes the latest, in place of news that nobody has taken from it.
	updates chan saleUpdate
}

// saleNews is the JSON of a saleView, or why there is none.
type saleUpdate struct {
	data []byte
	err  error
}

// join adds a viewer of a sale, who is told at once what is known of it. Each join is followed by a leave.
func (b *feed) subscribe(sale uuid.UUID) (*subscriber, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, err := b.item(sale)
	if err != nil {
		return nil, err
	}
	v := &subscriber{updates: make(chan saleUpdate, 1)}
	if len(t.subscribers) == 0 {
		t.sent = nil
	} else if t.sent != nil {
		v.updates <- saleUpdate{data: t.sent}
	}
	t.subscribers[v] = struct{}{}
	t.askedAt = time.Now()
	b.scheduleIfDue(t, b.changedAt)
	if last := cmp.Or(t.failure, t.latest); t.sent == nil && t.done == nil && last != nil {
		t.publish(last)
	}
	return v, nil
}

func (b *feed) unsubscribe(sale uuid.UUID, v *subscriber) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.items[sale].subscribers, v) // what is watched is not forgotten
}

// tell gives the viewers of a sale what they do not know of what was seen. It never waits. The board's mu is held.
func (t *feedItem) publish(s *snapshot) {
	if len(t.subscribers) > 0 {
		t.send(updateOf(s))
	}
}

func updateOf(s *snapshot) saleUpdate {
	if s.err != nil {
		return saleUpdate{err: s.err}
	}
	now := s.sales[0]
	if now.Err != nil {
		return saleUpdate{err: now.Err}
	}
	data, err := json.Marshal(saleView{State: now.State, Stock: now.Stock, Available: now.Available, Held: now.Held, Sold: now.Sold})
	return saleUpdate{data: data, err: err}
}

func (t *feedItem) send(news saleUpdate) {
	switch {
	case news.err == nil && bytes.Equal(news.data, t.sent):
		return
	case news.err == nil:
		t.sent = news.data
	case t.sent != nil && !errors.Is(news.err, reservation.ErrSaleNotFound):
		return // a server is away; what they were told stays the last that is known
	}
	for v := range t.subscribers {
		select {
		case <-v.updates: // older news, which nobody took
		default:
		}
		v.updates <- news // nobody else sends, and there is room now
	}
}
