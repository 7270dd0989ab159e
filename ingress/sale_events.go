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
		return problemSale
	}
	leave, err := s.enterSaleStream(c.Request())
	if err != nil {
		return err
	}
	defer leave()
	v, err := s.sales.join(sale)
	if err != nil {
		return err
	}
	defer s.sales.leave(sale, v)
	ended := c.Request().Context().Done()
	first := time.NewTimer(catalogTimeout)
	defer first.Stop()
	var news saleNews
	select {
	case news = <-v.news:
	case <-first.C:
		return problemUnavailable
	case <-s.ending:
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
		case news = <-v.news:
			if err = news.err; err == nil {
				err = stream.send("sale", 0, news.data)
			}
		case <-stream.heartbeats.C:
			err = stream.beat()
		case <-s.ending:
			return nil
		case <-ended:
			return nil
		}
	}
	return nil // the client is gone, or the sale is
}

type viewer struct {
	// news takes the latest, in place of news that nobody has taken from it.
	news chan saleNews
}

// saleNews is the JSON of a saleView, or why there is none.
type saleNews struct {
	data []byte
	err  error
}

// join adds a viewer of a sale, who is told at once what is known of it. Each join is followed by a leave.
func (b *board) join(sale uuid.UUID) (*viewer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, err := b.find(sale)
	if err != nil {
		return nil, err
	}
	v := &viewer{news: make(chan saleNews, 1)}
	if len(t.viewers) == 0 {
		t.told = nil
	} else if t.told != nil {
		v.news <- saleNews{data: t.told}
	}
	t.viewers[v] = struct{}{}
	t.asked = time.Now()
	b.lookIfDue(t, b.changedAt)
	if last := cmp.Or(t.failed, t.seen); t.told == nil && t.done == nil && last != nil {
		t.tell(last)
	}
	return v, nil
}

func (b *board) leave(sale uuid.UUID, v *viewer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.things[sale].viewers, v) // what is watched is not forgotten
}

// tell gives the viewers of a sale what they do not know of what was seen. It never waits. The board's mu is held.
func (t *thing) tell(s *sight) {
	if len(t.viewers) > 0 {
		t.give(newsOf(s))
	}
}

func newsOf(s *sight) saleNews {
	if s.err != nil {
		return saleNews{err: s.err}
	}
	now := s.sales[0]
	if now.Err != nil {
		return saleNews{err: now.Err}
	}
	data, err := json.Marshal(saleView{State: now.State, Stock: now.Stock, Available: now.Available, Held: now.Held, Sold: now.Sold})
	return saleNews{data: data, err: err}
}

func (t *thing) give(news saleNews) {
	switch {
	case news.err == nil && bytes.Equal(news.data, t.told):
		return
	case news.err == nil:
		t.told = news.data
	case t.told != nil && !errors.Is(news.err, reservation.ErrSaleNotFound):
		return // a server is away; what they were told stays the last that is known
	}
	for v := range t.viewers {
		select {
		case <-v.news: // older news, which nobody took
		default:
		}
		v.news <- news // nobody else sends, and there is room now
	}
}
