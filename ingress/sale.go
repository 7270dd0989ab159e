package ingress

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"stampede/reservation"
	"stampede/reservation/catalog"
	"stampede/reservation/order"
)

const (
	// defaultSales is the length of a page if the request has no limit.
	defaultSales = 50

	// salesBatchMax bounds the sales of one query, and salesMax those in memory.
	salesBatchMax = 1000
	salesMax      = 10_000
	// pagesMax bounds the later pages of the list in memory.
	pagesMax = 100
)

// publicSecond are the headers of answers about sales. They must not be changed.
var publicSecond = http.Header{"Cache-Control": {"public, max-age=1"}}

// saleService shows sales to everybody, from memory.
type saleService struct {
	*core
	// The feeds answer all requests. The first page of the list has one of its own, so that it never waits for later
	// pages, of which anybody can request any number.
	feed, firstPageFeed, laterPagesFeed *feed
}

func newSaleService(c *core) *saleService {
	s := &saleService{core: c}
	s.feed = startFeed(c.background, salesBatchMax, salesMax, s.countSales)
	s.firstPageFeed = startFeed(c.background, 1, 1, s.countPages)
	s.laterPagesFeed = startFeed(c.background, 1, pagesMax, s.countPages)
	return s
}

// show serves GET /v1/sales/{sale}.
func (s *saleService) show(c echo.Context) error {
	id, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	return answerFromFeed(c, s.feed, id, 0, func(f found) (any, error) {
		return f.sales[0].CountedSale, f.sales[0].Err
	})
}

// list serves GET /v1/sales, newest first.
func (s *saleService) list(c echo.Context) error {
	p, err := readPage(c, defaultSales, nil)
	if err != nil {
		return err
	}
	pages := s.laterPagesFeed
	if p.after == uuid.Nil {
		pages = s.firstPageFeed
	}
	return answerFromFeed(c, pages, p.after, p.limit, func(f found) (any, error) {
		sales := f.sales
		var answer struct {
			Sales      []catalog.CountedSale `json:"sales"`
			NextCursor string                `json:"next_cursor,omitempty"`
		}
		answer.Sales = make([]catalog.CountedSale, min(len(sales), p.limit))
		for i := range answer.Sales {
			if sales[i].Err != nil {
				return nil, sales[i].Err
			}
			answer.Sales[i] = sales[i].CountedSale
		}
		if len(sales) > p.limit {
			answer.NextCursor = cursorAfter(sales[p.limit-1].ID)
		}
		return answer, nil
	})
}

// answerFromFeed answers with the JSON of what view makes of an item, for clients and caches.
func answerFromFeed(
	c echo.Context, from *feed, key uuid.UUID, variant int, view func(found) (any, error),
) error {
	ctx, cancel := context.WithTimeout(c.Request().Context(), catalogTimeout)
	defer cancel()
	current, err := from.get(ctx, key)
	if err != nil {
		return err
	}
	answer, err := current.render(variant, func() (any, error) { return view(current.found) })
	if err != nil {
		return err
	}
	return writeTagged(c, publicSecond, answer.etag, jsonContent[0], answer.body)
}

// invalidate has this server show an operator's change immediately.
func (s *saleService) invalidate() {
	for _, f := range []*feed{s.feed, s.firstPageFeed, s.laterPagesFeed} {
		f.invalidate()
	}
}

// price is what a unit costs, in minor units of the currency; zero in a sale without a price. It never changes.
type price struct {
	unit     int64
	items    []reservation.Item // have the prices in a sale with items
	currency string
}

// amount is what so many units cost, or those of the lines in a sale with items; 0 if that is not known.
func (p price) amount(quantity int64, lines order.Lines) int64 {
	if lines == "" {
		return p.unit * quantity
	}
	sum := int64(0)
	for item, units := range lines.Each() {
		if item < len(p.items) {
			sum += p.items[item].UnitPrice * units
		}
	}
	return sum
}

// prices remembers the prices of sales that this server has shown, so that purchases need no query. It is safe for
// concurrent use.
type prices struct {
	mu   sync.RWMutex
	sale map[uuid.UUID]price
}

func (p *prices) learn(sales []catalog.CountResult) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sale == nil || len(p.sale) > salesMax {
		p.sale = make(map[uuid.UUID]price)
	}
	for _, s := range sales {
		p.sale[s.ID] = price{s.UnitPrice, s.Sale.Items, s.Currency}
	}
}

func (p *prices) find(sale uuid.UUID) (price, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	found, known := p.sale[sale]
	return found, known
}

// price returns the price of a sale at once. One that is not known is zero, and is looked up for the next caller.
func (s *saleService) price(sale uuid.UUID) price {
	found, known := s.prices.find(sale)
	if !known {
		_, _, _ = s.feed.recall(sale, time.Time{}) // schedules the query; a full feed knows others
	}
	return found
}

// followed returns the sales to follow. Their prices are known before they open.
func (s *saleService) followed(ctx context.Context, active []uuid.UUID, limit int) ([]uuid.UUID, error) {
	sales, err := s.config.Sales.Followed(ctx, active, limit)
	for _, sale := range sales {
		s.price(sale)
	}
	return sales, err
}

func (s *saleService) countSales(ctx context.Context, ids []uuid.UUID) (map[uuid.UUID]found, error) {
	sales, err := s.config.Sales.CountSales(ctx, ids)
	s.prices.learn(sales)
	all := make(map[uuid.UUID]found, len(sales))
	for _, sale := range sales {
		all[sale.ID] = found{sales: []catalog.CountResult{sale}}
	}
	return all, err
}

func (s *saleService) countPages(ctx context.Context, after []uuid.UUID) (map[uuid.UUID]found, error) {
	all := make(map[uuid.UUID]found, len(after))
	for _, key := range after {
		// One more sale than a page can have tells whether there is a next page.
		sales, err := s.config.Sales.CountPage(ctx, key, pageMax+1)
		if err != nil {
			return nil, err
		}
		s.prices.learn(sales)
		all[key] = found{sales: sales}
	}
	return all, nil
}

// stream serves GET /v1/sales/{sale}/events: the sale as it is, and every change.
func (s *saleService) stream(c echo.Context) error {
	sale, ok := parseID(c.Param("sale"))
	if !ok {
		return problemSaleNotFound
	}
	release, err := s.limits.openStream(&s.limits.saleStreams, c.Request(), "")
	if err != nil {
		return err
	}
	defer release()
	sub, err := s.feed.subscribe(sale)
	if err != nil {
		return err
	}
	defer s.feed.unsubscribe(sale, sub)
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
	Items     []itemView        `json:"items,omitempty"`
}

// itemView is what is left of an item.
type itemView struct {
	Code      string `json:"code"`
	Stock     int64  `json:"stock"`
	Available int64  `json:"available"`
}

func newSaleUpdate(result *snapshot) saleUpdate {
	if result.err != nil {
		return saleUpdate{err: result.err}
	}
	now := result.sales[0]
	if now.Err != nil {
		return saleUpdate{err: now.Err}
	}
	view := saleView{State: now.State, Stock: now.Stock, Available: now.Available, Held: now.Held, Sold: now.Sold}
	for _, i := range now.Items {
		view.Items = append(view.Items, itemView{i.Code, i.Stock, i.Available})
	}
	data, err := json.Marshal(view)
	return saleUpdate{data: data, err: err}
}
