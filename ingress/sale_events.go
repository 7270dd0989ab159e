package ingress

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
)

const (
	// saleEvery is how often a sale is looked at that somebody watches, at most.
	saleEvery = 500 * time.Millisecond
	// saleShare bounds the share of the time for which one sale is being looked at, to one part in so many: to count
	// a large sale is work for Postgres.
	saleShare = 4
	// salesAtOnce bounds how many sales are looked at at once.
	salesAtOnce = 2
	// saleTimeout bounds one look.
	saleTimeout = 2 * time.Second
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
	if !s.saleStreams.enter() {
		return problemOverloaded
	}
	defer s.saleStreams.leave()
	v := s.board.join(sale)
	defer s.board.leave(sale, v)
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

// saleBoard looks at the sales that are watched: at each once for everybody who does. It is safe for concurrent use.
type saleBoard struct {
	show       func(ctx context.Context, sale uuid.UUID) (reservation.Standing, error)
	background *background
	// looking bounds the looks that are under way.
	looking chan struct{}

	mu      sync.Mutex
	watched map[uuid.UUID]*watchedSale
}

// watchedSale is a sale that somebody watches.
type watchedSale struct {
	viewers map[*viewer]struct{}
	last    []byte // what they were told last; nil before the first look has succeeded
	stop    context.CancelFunc
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

func newSaleBoard(show func(context.Context, uuid.UUID) (reservation.Standing, error), b *background) *saleBoard {
	return &saleBoard{show: show, background: b, looking: make(chan struct{}, salesAtOnce), watched: make(map[uuid.UUID]*watchedSale)}
}

// join adds a viewer, who is told at once what is known of the sale. Whoever joins leaves in the end.
func (b *saleBoard) join(sale uuid.UUID) *viewer {
	v := &viewer{news: make(chan saleNews, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.watched[sale]
	if w == nil {
		w = &watchedSale{viewers: make(map[*viewer]struct{})}
		b.watched[sale] = w
		b.background.start(func(ctx context.Context) { b.watch(ctx, sale, w) })
	} else if w.last != nil {
		v.news <- saleNews{data: w.last}
	}
	w.viewers[v] = struct{}{}
	return v
}

func (b *saleBoard) leave(sale uuid.UUID, v *viewer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.watched[sale]
	delete(w.viewers, v)
	if len(w.viewers) == 0 {
		delete(b.watched, sale)
		if w.stop != nil {
			w.stop()
		}
	}
}

// watch looks at the sale until nobody watches it any more, or ctx ends.
func (b *saleBoard) watch(ctx context.Context, sale uuid.UUID, w *watchedSale) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	b.mu.Lock()
	w.stop = stop
	if len(w.viewers) == 0 {
		stop()
	}
	b.mu.Unlock()
	for {
		began := time.Now()
		select {
		case b.looking <- struct{}{}:
		case <-ctx.Done():
			return
		}
		looked := time.Now()
		news := b.look(ctx, sale)
		<-b.looking
		if ctx.Err() != nil {
			return
		}
		b.tell(w, news)
		select {
		case <-time.After(max(saleEvery-time.Since(began), saleShare*time.Since(looked))):
		case <-ctx.Done():
			return
		}
	}
}

func (b *saleBoard) look(ctx context.Context, sale uuid.UUID) saleNews {
	ctx, cancel := context.WithTimeout(ctx, saleTimeout)
	defer cancel()
	now, err := b.show(ctx, sale)
	if err != nil {
		return saleNews{err: err}
	}
	data, err := json.Marshal(saleView{State: now.State, Stock: now.Stock, Available: now.Available, Held: now.Held, Sold: now.Sold})
	return saleNews{data: data, err: err}
}

// tell gives the viewers what they do not know. It never waits.
func (b *saleBoard) tell(w *watchedSale, news saleNews) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case news.err == nil && bytes.Equal(news.data, w.last):
		return
	case news.err == nil:
		w.last = news.data
	case w.last != nil && !errors.Is(news.err, reservation.ErrSaleNotFound):
		return // a server is away; what they were told stays the last that is known
	}
	for v := range w.viewers {
		select {
		case <-v.news: // older news, which nobody took
		default:
		}
		v.news <- news // nobody else sends, and there is room now
	}
}
